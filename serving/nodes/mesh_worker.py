"""The worker that owns one engine and plays every role on its mesh: prompt in, tokens out.

Each turn is plan -> execute -> commit. The worker asks for the next plan's execution before it
sends the tokens of the last one, so the device waits for planning only.

When a step fails or does not come back in time the device is taken as lost: every request ends
with one `Failed`, and from then on new ones are refused. The worker never tries to go on, because
after a failed step the donated caches are gone.

Traces of steps are made by a profiler that waits on a thread of its own while steps run.

A request with an output constraint waits until its grammar is compiled, which is done elsewhere,
once for all requests with that constraint that wait, such as samples of one prompt.
With KV tiers it then waits, within a budget, for the part of its prompt that is stored there.

`member_worker.py` makes a worker of it that is one of several.
"""

from collections import deque
from functools import partial

from serving.clock import Clock, ns_of_s, s_of_ns
from serving.core.admission import check_request
from serving.core.buckets import CompiledProgram
from serving.core.grammar import Grammar, GrammarCompiler
from serving.core.profiling import (
    ProfileCapture,
    ProfileProblem,
    Profiler,
    ProfileRefusal,
)
from serving.core.request import (
    OutputConstraint,
    QueueFullError,
    Request,
    RequestError,
    TokenDelta,
)
from serving.core.step_plan import StepResult
from serving.engine.engine import Engine
from serving.engine.mesh_engine import MeshEngine
from serving.kv.offload import OffloadLimits
from serving.nodes import messages, request_spans
from serving.nodes.kv_offload import KVOffload
from serving.nodes.messages import Message, RefusalReason
from serving.nodes.node import NodeId, Outbox
from serving.nodes.request_spans import RequestSpans

_WATCHDOG = "watchdog"

_TRACE_WRITING_S = 60.0
"""How long writing a trace may take after its last step."""

COMPILING_MAX = 64
"""Grammars that may be compiled at one time."""


class MeshWorker:
    """A node around one `Engine`.

    `step_timeout_ns` is how long one step may take before the device counts as lost. It is
    noticed after one to two such spans, because one timer serves all steps. `grammars` compiles
    the constraints of requests, each within `grammar_timeout_ns`; None for a model without.
    `profiler` makes traces; None makes none. `programs` are those that the executor compiled.
    `offload` says how KV tiers are used; None if there are none. `clock` is for the spans of traced
    requests; None makes none.
    """

    def __init__(
        self,
        node_id: NodeId,
        engine: Engine | MeshEngine,
        step_timeout_ns: int,
        grammars: GrammarCompiler | None = None,
        grammar_timeout_ns: int = 0,
        profiler: Profiler | None = None,
        programs: tuple[CompiledProgram, ...] = (),
        offload: OffloadLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self._spans = RequestSpans(node_id, self.outbox, clock)
        self._engine = engine
        self._step_timeout_ns = step_timeout_ns
        self._grammars = grammars
        self._grammar_timeout_ns = grammar_timeout_ns
        self._profiler = profiler
        self._programs = programs
        self._profiling: dict[str, tuple[NodeId, int]] = {}
        # By constraint, and of each the requests that wait; all may have been aborted.
        self._compiling: dict[OutputConstraint, dict[str, tuple[NodeId, Request]]] = {}
        self._compilations: dict[str, OutputConstraint] = {}
        self._num_compilations = 0
        self._owners: dict[str, NodeId] = {}
        self._offload: KVOffload | None = None
        if offload is not None:
            assert isinstance(engine, Engine), "blocks of several ranks do not move"
            self._offload = KVOffload(self.outbox, engine.transfers, offload)
        self._fetching: dict[str, tuple[NodeId, Request, Grammar | None]] = {}
        self._failure: str | None = None
        self._steps_in_flight: deque[int] = deque()
        self._watched_step: int | None = None

    def on_message(self, source: NodeId, message: Message) -> None:
        """Takes one message; those of other roles are ignored."""
        match message:
            case messages.StepDone(result):
                self._on_step_done(result)
            case messages.Submit(request):
                self._on_submit(source, request)
            case messages.Computed(key, value, error) if key in self._profiling:
                self._on_traced(key, value, error)
            case messages.Computed(key) if key in self._compilations:
                self._on_grammar(message)
            case messages.Profile(query_id, num_steps, timeout_s):
                self._on_profile(source, query_id, num_steps, timeout_s)
            case messages.Abort(request_id):
                self._on_abort(request_id)
            case messages.StepFailed(step_index, detail):
                if step_index in self._steps_in_flight:
                    self._fail(detail)
            case messages.Crashed(detail):
                self._fail(detail)
            case messages.CacheReplied(reply):
                if self._offload is not None and self._failure is None:
                    self._start_fetched(self._offload.on_reply(reply))
            case messages.BlocksRead(read):
                if self._offload is not None and self._failure is None:
                    self._offload.on_read(read)
            case messages.QueryStatus(query_id):
                self._on_query(source, query_id)
            case _:
                pass

    def on_timer(self, name: str) -> None:
        """The watchdog: the step that was the oldest a whole timeout ago must be over by now.

        Other timers are those of waits for the KV tiers.
        """
        if name != _WATCHDOG:
            if self._offload is not None:
                self._start_fetched(self._offload.on_timer(name))
            return
        watched, self._watched_step = self._watched_step, None
        if watched is not None and watched in self._steps_in_flight:
            seconds = s_of_ns(self._step_timeout_ns)
            self._fail(f"step {watched} did not finish within {seconds:g} s")
        else:
            self._watch()

    def _on_profile(self, source: NodeId, query_id: int, num_steps: int, timeout_s: float) -> None:
        key = f"trace {query_id} of {source}"
        if key in self._profiling:
            return  # A duplicate: the first one is being served.
        if self._profiler is None:
            refusal = ProfileRefusal(ProfileProblem.OFF, "this worker makes no traces")
            self.outbox.send(source, messages.Profiled(query_id, refusal))
            return
        self._profiling[key] = (source, query_id)
        job = partial(self._profiler.capture, num_steps, timeout_s)
        self.outbox.compute(key, job, ns_of_s(timeout_s + _TRACE_WRITING_S))

    def _on_traced(self, key: str, value: object, error: str | None) -> None:
        source, query_id = self._profiling.pop(key)
        if not isinstance(value, ProfileCapture | ProfileRefusal):
            value = ProfileRefusal(ProfileProblem.FAILED, f"the trace failed: {error}")
        self.outbox.send(source, messages.Profiled(query_id, value))

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not (self._owners or self._compiling or self._fetching)

    def _on_query(self, source: NodeId, query_id: int) -> None:
        offload = None if self._offload is None else self._offload.status()
        engine = self._engine.status()
        status = messages.WorkerStatus(query_id, self._failure, engine, self._programs, offload)
        self.outbox.send(source, status)

    def _on_submit(self, source: NodeId, request: Request) -> None:
        request_id = request.request_id
        compiling = self._compiling.values()
        if any(request_id in known for known in (self._owners, self._fetching, *compiling)):
            return  # A duplicate: the first one is being served.
        if request.constraint is None or self._failure is not None:
            self._fetch(source, request, None)
            return
        self._spans.enter(request, request_spans.GRAMMAR)
        refused = self._begin_compiling(source, request)
        if refused is not None:
            self._refuse(source, refused)

    def _begin_compiling(self, source: NodeId, request: Request) -> messages.Refused | None:
        request_id, constraint = request.request_id, request.constraint
        assert constraint is not None
        if self._grammars is None:
            detail = f"{constraint.param} is not supported: this model has no grammars"
            return messages.Refused(request_id, RefusalReason.INVALID, detail, constraint.param)
        waiting = self._compiling.get(constraint)
        if waiting is not None:
            waiting[request_id] = (source, request)
            return None
        if len(self._compiling) >= COMPILING_MAX:
            detail = f"{COMPILING_MAX} grammars are being compiled already; send it again later"
            return messages.Refused(request_id, RefusalReason.BUSY, detail)
        self._compiling[constraint] = {request_id: (source, request)}
        self._num_compilations += 1
        key = f"grammar {self._num_compilations}"
        self._compilations[key] = constraint
        self.outbox.compute(
            key, partial(self._grammars.compile, constraint), self._grammar_timeout_ns
        )
        return None

    def _on_grammar(self, computed: messages.Computed) -> None:
        constraint, error = self._compilations.pop(computed.key), computed.error
        # That others' grammars take long is no fault of the request.
        invalid, busy = (RefusalReason.INVALID, constraint.param), (RefusalReason.BUSY, None)
        reason, param = busy if computed.is_busy else invalid
        for request_id, (source, request) in self._compiling.pop(constraint).items():
            if error is None:
                grammar = computed.value
                assert isinstance(grammar, Grammar), f"{grammar} is no grammar"
                self._fetch(source, request, grammar)
            else:
                self._refuse(source, messages.Refused(request_id, reason, error, param))

    def _fetch(self, source: NodeId, request: Request, grammar: Grammar | None) -> None:
        """Start a request, once the stored part of its prompt is there if it is worth waiting."""
        offload = None if self._failure is not None else self._offload
        if offload is not None and self._is_valid(request) and offload.fetch(request):
            self._fetching[request.request_id] = (source, request, grammar)
            self._spans.enter(request, request_spans.FETCH)
        else:
            self._start(source, request, grammar)

    def _is_valid(self, request: Request) -> bool:
        """Whether the engine will not refuse it for ever; if it will, it says why."""
        try:
            check_request(request, self._engine.limits, self._engine.buckets)
        except RequestError:
            return False
        return True

    def _start_fetched(self, request_id: str | None) -> None:
        if request_id is not None and request_id in self._fetching:
            self._start(*self._fetching.pop(request_id))

    def _start(self, source: NodeId, request: Request, grammar: Grammar | None) -> None:
        self._spans.enter(request, request_spans.QUEUE)
        refused = self._admit(request, grammar)
        if refused is not None:
            if self._offload is not None:
                self._offload.forget(request.request_id)
            self._refuse(source, refused)
            return
        self._owners[request.request_id] = source
        self.outbox.send(source, messages.Admitted(request.request_id))
        self._advance()

    def _refuse(self, source: NodeId, refused: messages.Refused) -> None:
        self._spans.end(refused.request_id, refused.reason.value)
        self.outbox.send(source, refused)

    def _admit(self, request: Request, grammar: Grammar | None) -> messages.Refused | None:
        request_id = request.request_id
        if self._failure is not None:
            return messages.Refused(request_id, RefusalReason.UNAVAILABLE, self._failure)
        try:
            self._engine.admit(request, grammar)
        except QueueFullError as error:
            return messages.Refused(request_id, RefusalReason.BUSY, str(error))
        except RequestError as error:
            return messages.Refused(request_id, RefusalReason.INVALID, str(error), error.param)
        return None

    def _on_abort(self, request_id: str) -> None:
        self._spans.end(request_id, "aborted")
        for waiting in self._compiling.values():
            waiting.pop(request_id, None)
        if self._offload is not None and self._fetching.pop(request_id, None) is not None:
            self._offload.forget(request_id)
        if self._owners.pop(request_id, None) is not None:
            self._engine.abort(request_id)
            self._advance()

    def _on_step_done(self, result: StepResult) -> None:
        # Anything but the oldest step is a duplicate, or late after the device was given up.
        if not self._steps_in_flight or result.step_index != self._steps_in_flight[0]:
            return
        self._steps_in_flight.popleft()
        deltas = self._take(self._engine.commit(result))
        if self._offload is not None:
            self._offload.on_swap_in(result.swap_in)
            self._offload.offer_kept()
        self._advance()
        self._send_tokens(deltas)

    def _take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """The deltas of a step as their owners are to see them; called before the next plan."""
        return deltas

    def _send_tokens(self, deltas: list[TokenDelta]) -> None:
        self._spans.take(deltas)
        by_owner: dict[NodeId, list[TokenDelta]] = {}
        for delta in deltas:
            owner = self._owners[delta.request_id]
            by_owner.setdefault(owner, []).append(delta)
            if delta.finish_reason is not None:
                del self._owners[delta.request_id]
        for owner, some in by_owner.items():
            self.outbox.send(owner, messages.Tokens(tuple(some)))

    def _advance(self) -> None:
        """Starts the steps that the engine wants to have in flight."""
        if self._failure is not None:
            return
        while (plan := self._engine.plan()) is not None:
            self._steps_in_flight.append(plan.step_index)
            self.outbox.execute(plan)
        for request_id in list(self._spans.queued):
            if not self._engine.is_waiting(request_id):
                self._spans.move(request_id, request_spans.PREFILL)
        self._watch()

    def _watch(self) -> None:
        """Keeps the watchdog running while a step is in flight; one timer serves many steps."""
        if self._watched_step is None and self._steps_in_flight:
            self._watched_step = self._steps_in_flight[0]
            self.outbox.set_timer(_WATCHDOG, self._step_timeout_ns)

    def _fail(self, detail: str) -> None:
        self._failure = detail
        self._spans.end_all(detail)
        self._steps_in_flight.clear()
        owners = dict(self._owners)
        for waiting in self._compiling.values():
            owners |= {name: owner for name, (owner, _) in waiting.items()}
        owners |= {name: owner for name, (owner, _, _) in self._fetching.items()}
        for request_id, owner in owners.items():
            self.outbox.send(owner, messages.Failed(request_id, detail))
        self._owners.clear()
        self._compiling.clear()
        self._compilations.clear()
        self._fetching.clear()
        # Last, because this raises when it was the engine that broke.
        self._engine.fail()
