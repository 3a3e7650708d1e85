"""The engine's loop in a thread of its own, with any number of asyncio clients around it."""
from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shared.engine import Engine
from shared.errors import EngineError, InvalidRequestError
from shared.output import CompletionOutput, RequestOutput
from shared.processor import check_arguments
from shared.sampling_params import SamplingParams, check_integer


class QueueFullError(EngineError):
    """More answers are open than may wait; try again later."""


class EngineStoppedError(EngineError):
    """The engine shuts down: it takes nothing new, and ends what does not finish in time."""


class EngineDeadError(EngineError):
    """A step raised. Nobody knows what state it left behind, so this engine serves no more."""


class RequestOutputCollector:
    """The mailbox of one client, with room for one output: the newest replaces what was not read.

    An output holds the whole answer so far. So a slow reader loses no text, costs no memory and stalls nobody.
    """

    def __init__(self, request_id: str, num_answers: int, abort: Callable[[RequestOutputCollector], None]):
        self.request_id, self.num_answers, self.finished = request_id, num_answers, False
        self.loop = asyncio.get_running_loop()
        self.accepted = self.loop.create_future()
        self._abort, self._read = abort, [0] * num_answers  # characters of each answer that were read
        self._mailbox: deque[RequestOutput | EngineError] = deque(maxlen=1)
        self._arrived = asyncio.Event()

    def put(self, message: RequestOutput | EngineError) -> None:
        """From any thread. `wake` must follow on the client's loop."""
        self._mailbox.append(message)

    def wake(self, error: EngineError | None = None) -> None:
        """On the client's loop: something arrived, or the request was accepted, or refused with this error."""
        self._arrived.set()
        if not self.accepted.done():
            self.accepted.set_result(None) if error is None else self.accepted.set_exception(error)

    def __aiter__(self) -> RequestOutputCollector:
        return self

    async def __anext__(self) -> RequestOutput:
        """The newest output, once there is one that was not read; raises what ended the engine."""
        if self.finished:
            raise StopAsyncIteration
        while not self._mailbox:
            self._arrived.clear()
            await self._arrived.wait()
        message = self._mailbox.popleft()
        self.finished = isinstance(message, EngineError) or message.finished
        if isinstance(message, EngineError):
            raise message
        return replace(message, outputs=[self._unread(answer) for answer in message.outputs])

    def _unread(self, answer: CompletionOutput) -> CompletionOutput:
        """new_text as this reader sees it: all that came since its last look."""
        start, self._read[answer.index] = self._read[answer.index], len(answer.text)
        return replace(answer, new_text=answer.text[start:])

    def close(self) -> None:
        """Abort the request unless its last output was read. At any time, as often as you like."""
        if not self.finished:
            self._abort(self)


class Mailboxes:
    """The collectors of all open requests. Single operations on a dict are atomic, so any thread may look."""

    def __init__(self) -> None:
        self.open: dict[str, RequestOutputCollector] = {}

    @property
    def num_answers(self) -> int:
        return sum(collector.num_answers for collector in list(self.open.values()))

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Put each output into its mailbox; a finished request is forgotten. Some have none: the engine had them."""
        outputs = [output for output in outputs if output.request_id in self.open]
        collectors = [self.open[output.request_id] for output in outputs]
        for collector, output in zip(collectors, outputs):
            collector.put(output)
            if output.finished:
                del self.open[output.request_id]
        wake(collectors)

    def refuse(self, request_id: str, error: EngineError) -> None:
        wake([self.open.pop(request_id)], error)

    def close(self, error: EngineError) -> None:
        """The same last word for everybody."""
        collectors = list(self.open.values())
        for collector in collectors:
            collector.put(error)
        wake(collectors, error)


def wake(collectors: Sequence[RequestOutputCollector], error: EngineError | None = None) -> None:
    """One call into each event loop, however many of its clients have news."""
    for loop in {collector.loop for collector in collectors}:
        news = [collector for collector in collectors if collector.loop is loop]
        try:
            loop.call_soon_threadsafe(ring, news, error)
        except RuntimeError:  # the loop is closed: nobody is left to read
            for collector in news:
                collector.close()


def ring(collectors: Sequence[RequestOutputCollector], error: EngineError | None) -> None:
    for collector in collectors:
        collector.wake(error)


class EngineThread:
    """The thread that owns the engine: nothing else touches it.

    Everybody else puts commands into the inbox. They are carried out between two steps; an engine that has
    nothing to run waits there, asleep.
    """

    def __init__(self, engine: Engine, on_output: Callable[[RequestOutput], None] | None = None):
        self.engine, self.on_output, self.mailboxes = engine, on_output or (lambda output: None), Mailboxes()
        self.error: EngineError | None = None  # why nothing new is taken
        self._lock = threading.Lock()  # nobody gets in between a look at `error` and the inbox
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deadline: float | None = None  # on the engine's clock, once it shuts down
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._obey():
                self._deliver(self.engine.step())
                if (failure := getattr(self.engine.runner, "failure", None)) is not None:
                    raise EngineError(failure)
            for request_id in list(self.mailboxes.open):
                self._abort(request_id)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            with self._lock:
                self.error = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
            self.mailboxes.close(self.error)
        self.engine.shutdown()

    def _obey(self) -> bool:
        """Carry out what came in since the last step; wait for it if nothing runs. False when all is over."""
        while True:
            idle = not self.engine.has_unfinished_requests()
            try:
                self._inbox.get(block=idle and self._deadline is None)()
            except queue.Empty:
                return self._deadline is None or not (idle or self.engine.clock() > self._deadline)

    def _add(self, arrival: float, request_id: str, *arguments: Any) -> None:
        try:
            self.engine.add_request(request_id, *arguments)
        except InvalidRequestError as error:
            self.mailboxes.refuse(request_id, error)
        else:
            for answer in self.engine.groups[request_id].answers:
                answer.request.times.arrival = arrival  # when the client came, not when the last step ended
            wake([self.mailboxes.open[request_id]])

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        self._deliver([] if output is None else [output])

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.on_output(output)
        self.mailboxes.deliver(outputs)


class AsyncEngine(EngineThread):
    """Serves an Engine to asyncio clients, of one event loop or several.

    At most max_num_seqs + max_waiting answers are open at once. `on_output` sees every output, on the
    engine's thread.
    """

    def __init__(
        self, engine: Engine, max_waiting: int = 256, on_output: Callable[[RequestOutput], None] | None = None
    ):
        check_integer("max_waiting", max_waiting, 0)
        self.max_open = engine.scheduler.max_num_seqs + max_waiting
        super().__init__(engine, on_output)

    async def add_request(
        self, request_id: str, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None,
        priority: int = 0, cache_salt: str = "",
    ) -> RequestOutputCollector:
        """Hand a request to the engine; iterate over what this returns for its outputs. Raises EngineErrors."""
        params = SamplingParams() if sampling_params is None else sampling_params
        check_arguments(request_id, prompt, params, priority, cache_salt)
        collector = RequestOutputCollector(request_id, params.n, self._close)
        with self._lock:
            self._check_room(request_id, params.n)
            self.mailboxes.open[request_id] = collector
            arrival = self.engine.clock()
            self._inbox.put(partial(self._add, arrival, request_id, prompt, params, priority, cache_salt))
        try:
            await collector.accepted
        except asyncio.CancelledError:
            collector.close()
            raise
        return collector

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; from any thread. Unknown ids are ignored."""
        self._inbox.put(partial(self._abort, request_id))

    def _close(self, collector: RequestOutputCollector) -> None:
        """Abort a collector's request, and not another one that has its name since it ended."""
        if self.mailboxes.open.get(collector.request_id) is collector:
            self.abort(collector.request_id)

    def shutdown(self, timeout: float = 1.0) -> None:
        """Take nothing new, let what runs finish within `timeout` seconds, abort the rest, end the thread."""
        with self._lock:
            self.error = self.error or EngineStoppedError("the engine is shutting down")
            self._inbox.put(partial(setattr, self, "_deadline", self.engine.clock() + timeout))
        self._thread.join()

    def _check_room(self, request_id: str, num_answers: int) -> None:
        if self.error is not None:
            raise self.error
        if request_id in self.mailboxes.open:
            raise InvalidRequestError("request_id", request_id, "a new, non-empty string")
        num_open = self.mailboxes.num_answers
        if num_open and num_open + num_answers > self.max_open:
            raise QueueFullError(f"{num_open} answers are open, of at most {self.max_open}; try again later")
