"""Several samples of one prompt: the prompt is computed once, and its blocks are shared.

Each sample is a request of its own, with a seed of its own. The requests of one *group* have the
same prompt. The first one that is admitted leads: the others wait until its first token is known.
Then the prompt's full blocks and the state at their end are kept under the prompt's prefix
(`prefix.py`), and the others start from there; what the prompt has behind its last full block, and
all that follows, each computes in blocks of its own. If the leader ends before that, the next one
leads.

*Why the partial tail is computed again and not copied*: to go on behind the prompt's last token a
sample needs the unfinished block, the state slot as it was right there, and the logits after that
token, from which each draws its first one by its own seed. The leader has overwritten the state by
the time its token is known, since the next step is in flight already, so a second snapshot would
have to be taken for every group, at a position where no other sequence looks for one; blocks would
have a second way to be shared, by copies on the device that each step would have to be ordered
with; and the last token would have to be computed for its logits all the same, in the same one
step. What would be saved is less than a block of prompt tokens for each sample, and those of all
samples share a step.
"""

import hashlib
from dataclasses import replace

from serving.core.request import Request, RequestError
from serving.core.sequence import Sequence, SequenceStatus

SAMPLES_MAX = 64
"""Samples of one prompt in one call."""


def fork(request: Request, num_samples: int) -> list[Request]:
    """The requests of `num_samples` samples of one prompt; the first is like the one given.

    Prompt log probabilities are left to the first, the prompt being the same for all.

    Raises:
        RequestError: `num_samples` is not 1 to `SAMPLES_MAX`.
    """
    if not 1 <= num_samples <= SAMPLES_MAX:
        raise RequestError(f"n is {num_samples}; expected 1 to {SAMPLES_MAX} samples", "n")
    if num_samples == 1:
        return [request]
    sampling = request.sampling
    group = request.request_id
    samples = [replace(request, fork_group=group)]
    for index in range(1, num_samples):
        seed = None if sampling.seed is None else sample_seed(sampling.seed, index)
        samples.append(
            replace(
                request,
                request_id=f"{group}.{index}",
                sampling=replace(sampling, seed=seed, prompt_logprobs=None),
                fork_group=group,
                sample_index=index,
            )
        )
    return samples


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: 63 bits, and the request's own for the first."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class ForkGroups:
    """The groups whose prompt is not computed yet, and the sequences that wait for it."""

    def __init__(self) -> None:
        self._leaders: dict[str, Sequence] = {}
        self._held: dict[str, list[Sequence]] = {}

    @property
    def num_held(self) -> int:
        """Sequences that wait for a leader."""
        return sum(map(len, self._held.values())) if self._held else 0

    def hold(self, sequence: Sequence) -> bool:
        """Take in a new sequence of a group. False if it is to start as any other, as leader."""
        group = sequence.request.fork_group
        assert group is not None, f"sequence {sequence.sequence_id} belongs to no group"
        if group in self._leaders:
            self._held.setdefault(group, []).append(sequence)
            return True
        self._leaders[group] = sequence
        return False

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ends; False if it was not held."""
        group = sequence.request.fork_group
        held = self._held.get(group, []) if group is not None else []
        if sequence not in held:
            return False
        held.remove(sequence)
        return True

    def take_ready(self) -> list[Sequence]:
        """The sequences that need not wait any longer since the last call, in order of admission.

        They are those whose leader has a token, and the new leader of a group whose old one ended
        without any.
        """
        ready: list[Sequence] = []
        for group, leader in list(self._leaders.items()):
            if leader.output_token_ids:
                ready += self._held.pop(group, [])
                del self._leaders[group]
            elif leader.status is SequenceStatus.FINISHED:
                held = self._held.get(group)
                if held:
                    self._leaders[group] = held.pop(0)
                    ready.append(self._leaders[group])
                else:
                    self._held.pop(group, None)
                    del self._leaders[group]
        return ready
