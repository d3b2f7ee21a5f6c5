"""Goal: the two commands find a Python, install once, and heal what an interruption left.
Method: a copy of the scripts in a folder whose name holds a space, run with a stand-in for Python
that writes down how it is called, makes a virtual environment by copying itself, and fails when
told to. Nothing is installed and nothing outside the temporary folder is touched.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

STAND_IN = """#!/bin/sh
# Stand-in for Python: see the tests. Keeps a list of its calls in $CALLS.
echo "$*" | head -1 >>"$CALLS"
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip")
    if [ "$3" = install ]; then
      if [ -e "$CALLS.fail" ]; then exit 1; fi
      if [ -e "$CALLS.kill" ]; then kill -9 $PPID; fi
    fi ;;
  "-m ruff") if [ -e "$CALLS.untidy" ]; then echo "a finding"; exit 1; fi ;;
  "-m serving") shift 2; echo "serving in $PWD with" "$@" ;;
  "-m pytest") shift 2; echo "testing in $PWD with" "$@" ;;
esac
"""


@dataclass
class Project:
    """A folder with the scripts, a stand-in for Python, and the record of its calls."""

    root: Path
    home: Path
    calls: Path

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.home / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(self.home),
            "CALLS": str(self.calls),
        }
        return subprocess.run(
            command,
            cwd=cwd or self.home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def serve(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.root / "scripts" / "serve"), *arguments)

    def installations(self) -> list[str]:
        """Arguments of every `pip install` so far."""
        lines = self.calls.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("-m pip install")]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root, home = tmp_path / "a folder", tmp_path / "home"
    shutil.copytree(SCRIPTS, root / "scripts")
    (root / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    (home / "bin").mkdir(parents=True)
    stand_in = home / "bin" / "python3.12"
    stand_in.write_text(STAND_IN, encoding="utf-8")
    stand_in.chmod(0o755)
    return Project(root, home, tmp_path / "calls")


def test_the_first_start_installs_and_a_warm_one_does_not(project: Project) -> None:
    first = project.serve("--port", "80 80")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"serving in {project.home} with --port 80 80\n"
    assert "Installing" in first.stderr
    assert project.installations() == [
        f"-m pip install --disable-pip-version-check --editable {project.root}"
    ]
    project.calls.write_text("", encoding="utf-8")
    warm = project.serve()
    assert warm.stdout.startswith("serving in") and warm.stderr == ""
    assert project.calls.read_text(encoding="utf-8").splitlines() == ["-m serving"]


def test_test_installs_the_tools_and_runs_in_the_project(project: Project) -> None:
    project.serve()
    result = project.run(str(project.root / "scripts" / "test"), "-q")
    assert result.stdout == f"testing in {project.root} with -q\n", result.stderr
    assert project.installations()[-1].endswith(f"{project.root}[dev]")
    count = len(project.installations())
    project.serve()
    assert len(project.installations()) == count


def test_check_runs_every_gate_and_fails_if_one_does(project: Project) -> None:
    check = str(project.root / "scripts" / "check")
    clean = project.run(check)
    verdicts = [line.split()[:2] for line in clean.stdout.splitlines()[-5:]]
    gates = ["style", "layout", "imports", "rules", "types"]
    assert verdicts == [[gate, "ok"] for gate in gates], clean.stdout
    assert clean.returncode == 0
    project.calls.with_name("calls.untidy").touch()
    found = project.run(check)
    assert found.returncode == 1 and found.stdout.count("a finding") == 2
    verdicts = [line.split()[:2] for line in found.stdout.splitlines()[-5:]]
    failed = {gate: "FAILED" if gate in ("style", "layout") else "ok" for gate in gates}
    assert verdicts == [list(pair) for pair in failed.items()]


def test_a_changed_pyproject_and_a_moved_folder_install_again(project: Project) -> None:
    project.serve()
    (project.root / "pyproject.toml").write_text("[project]\n# more\n", encoding="utf-8")
    project.serve()
    assert len(project.installations()) == 2
    project.root = project.root.rename(project.root.with_name("another folder"))
    assert project.serve().returncode == 0
    assert project.installations()[2].endswith(str(project.root))


def test_a_killed_installation_is_started_again_from_nothing(project: Project) -> None:
    kill = project.calls.with_name("calls.kill")
    kill.touch()
    assert project.serve().returncode != 0
    rest = project.root / ".venv" / "half a package"
    rest.touch()
    kill.unlink()
    healed = project.serve()
    assert "interrupted; starting again" in healed.stderr
    assert healed.stdout.startswith("serving in") and not rest.exists()


def test_an_orderly_failure_says_so_and_keeps_what_was_there(project: Project) -> None:
    project.serve()
    kept = project.root / ".venv" / "kept"
    kept.touch()
    (project.root / "pyproject.toml").write_text("[project]\n# more\n", encoding="utf-8")
    fail = project.calls.with_name("calls.fail")
    fail.touch()
    failed = project.serve()
    assert failed.returncode == 1 and "The installation failed" in failed.stderr
    assert failed.stdout == "" and kept.exists()
    fail.unlink()
    assert project.serve().returncode == 0 and kept.exists()


def test_a_virtual_environment_without_a_working_python_is_made_again(project: Project) -> None:
    project.serve()
    interpreter = project.root / ".venv" / "bin" / "python"
    interpreter.unlink()
    interpreter.symlink_to("/nonexistent/python")
    assert project.serve().stdout.startswith("serving in")
    assert not interpreter.is_symlink()


def test_a_shim_that_exists_and_fails_is_passed_over(project: Project) -> None:
    shim = project.home / "bin" / "python3.12"
    found = project.home / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3"
    found.parent.mkdir(parents=True)
    shim.rename(found)
    shim.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    result = project.serve()
    assert result.stdout.startswith("serving in"), result.stderr
    assert f"with {found}" in result.stderr and "command not found" not in result.stderr


def bash(project: Project, text: str) -> subprocess.CompletedProcess[str]:
    source = f"set -euo pipefail; source '{project.root}/scripts/environment.sh'; "
    return project.run("bash", "-c", source + text)


def test_without_any_python_the_message_says_what_to_install(project: Project) -> None:
    result = bash(project, "usable() { return 1; }; prepare")
    assert result.returncode == 1 and result.stdout == ""
    assert "Python 3.12 or newer" in result.stderr and "apt install" in result.stderr
    assert not (project.root / ".venv").exists()


def test_without_any_python_uv_brings_one(project: Project) -> None:
    uv = project.home / "bin" / "uv"
    uv.write_text(
        '#!/bin/sh\nmkdir -p "$5/bin" && cp "$(dirname "$0")/python3.12" "$5/bin/python"\n'
    )
    uv.chmod(0o755)
    result = bash(project, "usable() { return 1; }; prepare; echo ready")
    assert result.stdout == "ready\n", result.stderr
    assert "with uv" in result.stderr and len(project.installations()) == 1


def test_usable_means_new_enough_and_running(project: Project) -> None:
    assert bash(project, f"usable '{sys.executable}'").returncode == 0
    assert bash(project, "usable /nonexistent/python").returncode != 0
    old = project.home / "bin" / "old"
    # The real check, told that this Python is 3.11.
    old.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 11)\n$2"\n'
    )
    old.chmod(0o755)
    assert bash(project, f"usable '{old}'").returncode != 0
