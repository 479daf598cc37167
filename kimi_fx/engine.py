"""The engine: requests wait, take a slot, are prefilled in chunks, and decode together, one round a step.

`add` and `step` are all there is; `generate` loops over them, so any number of open streams share a batch. The
round itself is `graphs.step`; this file decides who takes part and hands out what came. It is long because a
request's whole way, from its place in the queue to its last delta, is here.
"""

import secrets
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from .admit import complete, longest, plan, stops, token_limit
from .compose import load_config, sampling_from
from .config import Config, Mode, SamplingParams
from .graphs.pytree import tree_map
from .graphs.state import empty_pool, empty_state, slots
from .graphs.step import ddtree_step, prefill_step
from .ops import REFERENCE
from .prompts import Prompts, to_ids
from .request import Plan, Request, results_of
from .results import Delta, TokenLogprob
from .runtime.agree import agree
from .runtime.buckets import shape_for
from .runtime.flight import Flight, copied
from .runtime.load import Loaded, load, prepare, settled
from .runtime.memory import Ask, available, check_memory
from .runtime.pages import Pages, pages_for
from .runtime.ranks import Ranks, own_place
from .runtime.rounds import Rounds, check_steps, compiles
from .runtime.slots import move, seat, vacate
from .runtime.trace import Trace
from .text import TextStream
from .turns import Stream, Taken, Turn, alone


class Engine:
    """One loaded model pair and the requests on it, for one thread at a time: a call is refused with RuntimeError while
    another thread's is at work. A stream may be dropped in any thread, and ends with the next step at the latest.

    `add` takes ids and returns the request's id; `step` advances everything once and returns what came.
    `generate` takes texts, ids or chats and does both.
    """

    def __init__(self, config: Config, loaded: Loaded) -> None:
        self.config, self.loaded, self.model = config, loaded, loaded.model
        self.max_len = longest(config, self.model)
        self.plan = plan(config, self.model, config.step.mode, config.step.budget)
        check_steps(config, loaded.device, loaded.dtype)
        compiled = compiles(config, loaded.device, loaded.dtype)
        self.rounds = Rounds(config, loaded, self.plan) if compiled else None
        way = "compiled" if self.rounds else "reference" if loaded.model.ops is REFERENCE else "kernels"
        self.backend = f"{loaded.device.type} {way}"
        if loaded.params is None:
            free, _ = available(loaded.device, self.model.ranks)
            check_memory(Ask(config, self.plan, self.max_len), self.model, loaded.dtype, loaded.device, free)
        batch, table = config.run.batch, pages_for(self.max_len)
        total = pages_for(config.cache.tokens) if config.cache.tokens else batch * table
        with torch.inference_mode(False):  # both are written in place, whoever calls
            self.pool = empty_pool(self.model, total, loaded.dtype, loaded.device)
            self.state = empty_state(batch, table, self.model.target.V, loaded.device)
        self.pages = Pages(total)
        self.turn, self.stepping = Turn(), False
        self.waiting: deque[Request] = deque()
        self.seated: list[Request] = []  # slot i is row i of the state
        self.inbox: dict[int, deque[Delta]] = {}  # of requests whose deltas a `generate` collects
        self.left: deque[int] = deque()  # those of them that nobody reads any more
        self.names = count()
        self.flights: deque[Flight] = deque()  # launched, not read
        self.lag = 1 if self.rounds and self.rounds.graphs else 0  # rounds that the host reads behind the device
        self.ranks: Ranks | None = None
        self.orders: list[Request | int] = []  # for the other ranks: requests added, ids cancelled since the last step
        self.trace = Trace(config.run.trace) if config.run.trace is not None else None

    @classmethod
    def load(cls, overrides: Sequence[str] = (), progress: bool = True) -> Self:
        """An engine from overrides such as `["target=kimi_nano", "step.budget=15"]`.

        Raises ValueError (ConfigError, CheckpointError) with one clear sentence a problem, before loading.
        """
        return cls.open(load_config(overrides), progress)

    @classmethod
    def open(
        cls,
        config: Config,
        progress: bool = True,
        check: Callable[[Self], object] = id,
        ranks: Ranks | None = None,
    ) -> Self:
        """As `load`, from a configuration; `check` sees the engine before the weights are read, and may raise. `ranks`:
        those that this process has joined already; else it is their first."""
        place = ranks.place if ranks else own_place(config)
        config = config if ranks else settled(config, place)
        engine = cls(config, prepare(config, place))
        check(engine)
        if place.size == 1:
            engine._load(progress)
            return engine
        engine.ranks = ranks = ranks or Ranks(place, config, cls)
        weakref.finalize(engine, ranks.close)
        if engine.rounds:
            engine.rounds.ranks, ranks.release = ranks, engine.rounds.release
        try:
            engine._load(progress, ranks.join(engine.loaded.device))
            ranks.meet("loaded")
        except BaseException as error:
            ranks.fail(error)
            raise
        return engine

    def _load(self, progress: bool, mesh: DeviceMesh | None = None) -> None:
        """The weights, and what the artefact store has."""
        with torch.inference_mode(False), torch.no_grad():
            self.loaded = load(self.config, self.loaded, progress, mesh)
            if self.rounds:
                self.rounds.load_all(self.loaded.params, self.pool, self.state)

    @alone
    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | dict[str, Any] | None = None,
        mode: Mode | None = None,
        budget: int | None = None,
    ) -> int:
        """Queue one prompt of ids; returns the request's id.

        Raises ValueError for what can never run, and for `n` above 1, which `generate` does.
        """
        if not isinstance(prompt, list | tuple):
            raise ValueError(f"add takes a list of token ids, found {prompt!r:.60}: generate takes texts and chats.")
        given = self._params(params, {})
        if given.n > 1:
            raise ValueError(f"n={given.n}: add queues one sample, use generate for several.")
        request = self._request(prompt, given, self._plan(mode, budget))
        self._queue([request])
        return request.id

    @alone
    def step(self) -> list[Delta]:
        """Admit what fits, prefill one chunk of one request, decode one round of the others.

        A step that raises ends the requests it had seated with finish "error"; the engine goes on.
        """
        self._drop()  # before the step, as the other ranks do it, so that all free slots in one order
        self.stepping, deltas = True, []
        try:
            if self.ranks and not self.ranks.place.rank:
                orders, self.orders = self.orders, []
                self.ranks.lead(orders)
            with torch.inference_mode(self.rounds is None), torch.no_grad():
                self._admit()
                deltas += self._prefill()
                deltas += self._round()
        except BaseException as error:
            deltas += [r.delta(reason="error", stop="a step failed") for r in self.seated if r.finish is None]
            self.flights.clear()
            if self.ranks:
                self.ranks.fail(error)
            raise
        finally:
            self.stepping = False
            if self.ranks:
                self.ranks.watch.done()
            self._dismiss()
            for delta in deltas:
                if delta.request in self.inbox:
                    self.inbox[delta.request].append(delta)
        return deltas

    @alone
    def cancel(self, request: int) -> None:
        """End a request now, free its memory, and tell its stream; one that is unknown or over is left alone."""
        for r in (*self.waiting, *self.seated):
            if r.id == request:
                last = r.delta(reason="abort")
                self._order(request)
                if request in self.inbox:
                    self.inbox[request].append(last)
        self.waiting = deque(r for r in self.waiting if r.finish is None)
        if not self.stepping:  # else the step does it at its end
            self._dismiss()

    def obey(self, order: Request | int) -> None:
        """Add or cancel on this rank what was added or cancelled on the first."""
        if isinstance(order, int):
            self.cancel(order)
        else:
            self.waiting.append(replace(order, stream=self._stream(order.params)))

    @property
    def busy(self) -> bool:
        """Some request is waiting or running."""
        return bool(self.waiting or self.seated)

    @alone
    def generate(
        self,
        prompts: Prompts = None,
        sampling_params: SamplingParams | dict[str, Any] | Sequence[SamplingParams | dict[str, Any]] | None = None,
        *,
        messages: Prompts = None,
        stream: bool = False,
        mode: Mode | None = None,
        budget: int | None = None,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt or a list: texts, lists of ids, or chats (`messages`).

        `sampling_params`: one for all or a list with one a prompt; keyword arguments are its fields and go over
        it. One prompt gives one `Result`, a list gives a list in its order. `stream=True` gives an iterator of
        `Delta` that starts with its first `next`; closing it ends its requests. Raises ValueError before anything
        runs.
        """
        requests, single = self._requests(prompts, messages, sampling_params, fields, self._plan(mode, budget))
        deltas = self._collect(requests)
        if stream:
            return Stream(self.turn, deltas)
        results = results_of(requests, list(deltas))
        return results[0] if single else results

    def check(self, prompts: Prompts, sampling_params: Any = None) -> None:
        """Raise the ValueError that `generate` would, and run nothing."""
        self._requests(prompts, None, sampling_params, {}, self.plan)

    def settings(self) -> str:
        """One line on what a request gets that does not say otherwise, and where from."""
        p, given, own = complete(self.config.sampling, self.loaded), self.config.sampling, self.loaded.text.defaults

        def origin(name: str) -> str:
            return "as set" if getattr(given, name) is not None else "checkpoint" if name in own else "default"

        shown = ", ".join(f"{name} {getattr(p, name):g} ({origin(name)})" for name in ("temperature", "top_p", "top_k"))
        stops = ", ".join(map(str, self.loaded.text.stop_ids))
        return f"{self.plan.mode}, {self.backend}, up to {self.max_len} tokens; {shown}; stop ids {stops}"

    def _requests(
        self, prompts: Prompts, messages: Prompts, given: Any, fields: dict[str, Any], how: Plan
    ) -> tuple[list[Request], bool]:
        ids, single = to_ids(prompts, messages, self.loaded, self.config)
        several = given if isinstance(given, list | tuple) else [given] * len(ids)
        if len(several) != len(ids):
            raise ValueError(f"sampling_params has {len(several)} entries for {len(ids)} prompts: give one each.")
        params = [self._params(one, fields) for one in several]
        requests = []
        for place, (prompt, one) in enumerate(zip(ids, params, strict=True)):
            first = self._request(prompt, one, how, place)
            requests += [first] + [
                replace(first, id=next(self.names), sample=s, ids=[], emitted=[], pages=[], stream=self._stream(one))
                for s in range(1, one.n)
            ]
        return requests, single

    def _params(self, given: SamplingParams | dict[str, Any] | None, fields: dict[str, Any]) -> SamplingParams:
        base = given if isinstance(given, SamplingParams) else self.config.sampling
        named = given if isinstance(given, dict) else {}
        if given is not None and not isinstance(given, SamplingParams | dict):
            raise ValueError(f"sampling_params is {given!r}: give a SamplingParams or a dict of its fields.")
        return sampling_from(named | fields, base)

    def _plan(self, mode: Mode | None, budget: int | None) -> Plan:
        mode = self.config.step.mode if mode is None else mode
        if budget is None and mode == self.config.step.mode:
            return self.plan
        return plan(self.config, self.model, mode, budget)

    def _request(self, prompt: Sequence[int], params: SamplingParams, how: Plan, place: int = 0) -> Request:
        params = complete(params, self.loaded)
        limit = token_limit(prompt, params, self.loaded, self.max_len, self.pages.count)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return Request(
            next(self.names), tuple(prompt), params, how, limit, seed, self.backend, place, stream=self._stream(params)
        )

    def _stream(self, params: SamplingParams) -> TextStream | None:
        tokenizer = self.loaded.text.tokenizer
        if tokenizer is None:
            return None
        return TextStream(tokenizer, params.stop, params.keep_stop, params.skip_special_tokens, params.least)

    def _queue(self, requests: list[Request]) -> None:
        self.waiting.extend(requests)
        for request in requests:
            self._order(replace(request, stream=None))

    def _order(self, order: Request | int) -> None:
        if self.ranks and not self.ranks.place.rank:
            self.orders.append(order)

    def _admit(self) -> None:
        while self.waiting and len(self.seated) < self.config.run.batch:
            request = self.waiting[0]
            pages = self.pages.take(len(request.prompt) + request.limit)
            if pages is None:
                return
            request.pages = pages
            self.seated.append(self.waiting.popleft())
            seat(self.state, len(self.seated) - 1, request, stops(request.params, self.loaded))

    def _prefill(self) -> list[Delta]:
        slot = next((i for i, r in enumerate(self.seated) if r.prefilling), None)
        if slot is None:
            return []
        request, device = self.seated[slot], self.loaded.device
        request.begin()
        if not request.limit:
            request.prefilled = len(request.prompt)
            return [request.delta(reason="length")]
        chunk = request.prompt[request.prefilled :][: self.config.run.chunk]
        final = request.prefilled + len(chunk) == len(request.prompt)
        row = tree_map(lambda leaf: leaf[slot : slot + 1], self.state)
        if self.rounds:
            emitted = self.rounds.prefill(self.loaded.params, self.pool, row, chunk, final)
        else:
            _, emitted = prefill_step(
                self.loaded.params, self.pool, row,
                torch.tensor([chunk], device=device), torch.tensor([len(chunk)], device=device),
                torch.tensor([final], device=device), self.model,
            )  # fmt: skip
        request.prefilled += len(chunk)
        return [] if request.prefilling else self._land(Flight([(0, request)], emitted, decoding=False))

    def _round(self) -> list[Delta]:
        taking_part = [(i, r) for i, r in enumerate(self.seated) if not r.prefilling and r.finish is None]
        if not taking_part:
            return self._land()
        shape = shape_for(self.config, self.model, len(self.seated), [r.plan for _, r in taking_part])
        came = self.rounds.decode(shape, self.loaded.params, self.pool, self.state) if self.rounds else None
        eager = came is None
        if came is None:
            came = ddtree_step(self.loaded.params, self.pool, slots(self.state, shape.batch), shape, self.model)
        if self.ranks and self.config.mesh.check:
            agree(came[1], came[2])
        return self._land(Flight(taking_part, came[2], came[1] if self.trace else None, eager=eager))

    def _land(self, flight: Flight | None = None) -> list[Delta]:
        """Read all that was launched but the last `lag` steps; everything where nothing new is launched."""
        deltas: list[Delta] = []
        if flight:
            self.flights.append(copied(flight) if self.lag else flight)
        while len(self.flights) > (self.lag if flight else 0):
            deltas += self._absorb(self.flights.popleft())
        return deltas

    def _absorb(self, flight: Flight) -> list[Delta]:
        if flight.arrived:
            flight.arrived.synchronize()
        e: Any = tree_map(lambda leaf: leaf.tolist(), flight.emitted)
        rows = [(i, r) for i, r in flight.rows if r.finish is None]  # others ended on the host meanwhile
        deltas = []
        for i, request in rows:
            n = e.count[i]
            wanted = range(n if request.params.logprobs is not None else 0)
            logprobs = [self._logprob(request, e, i, j) for j in wanted]
            nodes = e.nodes[i] if flight.decoding else 0
            deltas.append(request.absorb(e.tokens[i][:n], e.finish[i], logprobs, nodes, flight.eager))
        if self.trace and flight.tree:
            self.trace.write(rows, flight.tree, flight.emitted)
        for slot, request in enumerate(self.seated):
            if request.fruitless == self.config.step.give_up and request.gave_up is None:
                request.stop_drafting()
                self.state.budget[slot].fill_(0)
        return deltas

    def _logprob(self, request: Request, e: Any, i: int, j: int) -> TokenLogprob:
        token, wanted, tokenizer = e.tokens[i][j], request.params.logprobs, self.loaded.text.tokenizer
        top = zip(e.top_ids[i][j][:wanted], e.top_logprobs[i][j][:wanted], strict=True)
        text = tokenizer.token_text(token) if tokenizer else ""
        return TokenLogprob(token, e.logprob[i][j], text, tuple((a, b) for a, b in top if a >= 0))

    def _dismiss(self) -> None:
        """Free the slots and pages of requests that ended; the last row moves into each hole. Nobody reads a step that
        only they were part of."""
        for i in reversed(range(len(self.seated))):
            if self.seated[i].finish is not None:
                self.pages.give(self.seated[i].pages)
                last = self.seated.pop()
                if i < len(self.seated):
                    self.seated[i] = last
                    move(self.state, len(self.seated), i)
                vacate(self.state, len(self.seated))
        self.flights = deque(f for f in self.flights if any(r.finish is None for _, r in f.rows))

    def _collect(self, requests: list[Request]) -> Generator[Delta, None, None]:
        inbox: deque[Delta] = deque()
        self.inbox.update({r.id: inbox for r in requests})
        self._queue(requests)
        try:
            while any(r.finish is None for r in requests) or inbox:
                if not inbox:
                    self.step()
                while inbox:
                    yield inbox.popleft()
        finally:
            self.left.extend(r.id for r in requests)
            with suppress(Taken), self.turn:
                if not self.stepping:  # else, and where another thread is at work, the next step does it
                    self._drop()

    def _drop(self) -> None:
        """End the requests that nobody reads any more."""
        while self.left:
            request = self.left.popleft()
            self.inbox.pop(request, None)
            self.cancel(request)
