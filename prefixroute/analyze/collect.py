"""One pass over a log: the counts and requests that the collector keeps, by model and tenant.

Rules:
1. Memory is bounded by the constants below, however long the log is.
2. Models share nothing. Tenants of a model are counted twice: in one cache for all, and as if they shared nothing.
3. Counts are exact until all stacks together have more than `exact_blocks` blocks; from then on blocks are sampled.
4. A line that is no request never ends the pass: it is counted, and the report shows the first such lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from prefixroute import UsageError

from .prefixes import TopPrefixes
from .prompt_keys import KeyedPrompt, Keys, PromptReader, TemplateRefusal, salted
from .records import BadLine, Content, Record, TraceBlocks, parse
from .sample import SAMPLE_BLOCKS, Sampled
from .sources import SourceLine, lines
from .stack import ExactCurve, HitCurve

EXACT_BLOCKS = 1_000_000
"""Blocks of all exact stacks together: some 140 MB."""

MODELS, TENANTS = 32, 500
"""The most models of a log, and tenants of a model, that are told apart; later ones are counted together as OTHERS."""

KEPT_BLOCKS = 2_000_000
"""The most blocks in the requests that are kept for the simulator, of all models together: 16 MB."""

SHOWN_LINES, REASONS = 10, 50
OTHERS = "(others)"
UNNAMED = "(none)"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the collection; `method` is auto, exact (however much memory it takes) or sampled.

    `texts` keeps texts of prefixes for the report; `tenant_field` names the field of a tenant in a line.
    """

    method: str = "auto"
    exact_blocks: int = EXACT_BLOCKS
    sample_blocks: int = SAMPLE_BLOCKS
    kept_requests: int = 3000
    texts: bool = False
    tenant_field: str = ""

    def __post_init__(self) -> None:
        if self.method not in ("auto", "exact", "sampled"):
            raise UsageError("method is auto, exact or sampled")
        if min(self.exact_blocks, self.sample_blocks) < 64 or self.kept_requests < 0:
            raise UsageError("exact_blocks and sample_blocks are at least 64, kept_requests at least 0")


class Kept(NamedTuple):
    """A request that is kept for the simulator."""

    at: float | None
    tenant: str
    prompt: KeyedPrompt


class Scope:
    """Blocks that may share a cache: counted exactly at first, and by a sample once there are too many."""

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.sample_blocks
        self._curve: ExactCurve | Sampled = Sampled(self._limit) if limits.method == "sampled" else ExactCurve()

    @property
    def exact(self) -> bool:
        """Whether the counts are still exact."""
        return isinstance(self._curve, ExactCurve)

    def sample(self) -> None:
        """From now on, count a sample of the blocks only."""
        if isinstance(self._curve, ExactCurve):
            self._curve = Sampled.following(self._curve, self._limit)

    def access(self, keys: Keys, listed: Sequence[int], tenant: str) -> int:
        """Count a request; return how many leading blocks were seen before (a lower bound where blocks are sampled)."""
        if isinstance(self._curve, ExactCurve):
            return self._curve.access(listed, tenant)
        return self._curve.access(keys, listed, tenant)

    @property
    def blocks(self) -> int:
        """Blocks in the exact stack."""
        return len(self._curve.stack) if isinstance(self._curve, ExactCurve) else 0

    def curve(self, tenant: str | None = None) -> HitCurve:
        """Return the hit curve of all requests, or of one tenant's."""
        return self._curve.curve(tenant)


@dataclass(slots=True)
class Tenant:
    """Totals of a tenant's requests: their number, their prompt tokens, and their whole blocks."""

    requests: int = 0
    tokens: int = 0
    blocks: int = 0


class ModelLog:
    """The counts of one model's requests: `shared` as in one cache for all, `apart` as if tenants shared nothing."""

    def __init__(self, block_tokens: int, limits: Limits) -> None:
        self.block_tokens = block_tokens
        self.tenants: dict[str, Tenant] = {}
        self.shared = Scope(limits)
        self.apart = Scope(limits)
        self.prefixes = TopPrefixes()
        self.kept: list[Kept] = []
        self.first_at: float | None = None
        self.last_at: float | None = None

    @property
    def totals(self) -> Tenant:
        """The totals of all tenants together."""
        every = self.tenants.values()
        return Tenant(sum(t.requests for t in every), sum(t.tokens for t in every), sum(t.blocks for t in every))

    def release(self) -> None:
        """Free the memory of all data but the requests for the simulator."""
        self.shared = self.apart = Scope(Limits())
        self.prefixes = TopPrefixes()


@dataclass(slots=True)
class Log:
    """A log that was read; `bad` counts bad lines by reason, `shown` are the first of them as (file, number, reason).

    `kinds` are the kinds of prompts that it has: text, tokens, trace.
    """

    models: dict[str, ModelLog] = field(default_factory=dict)
    lines: int = 0
    requests: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    shown: list[tuple[str, int, str]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)


class Collector:
    """Reads a log, line by line, into a `Log`."""

    def __init__(self, reader: PromptReader, limits: Limits) -> None:
        self.log = Log()
        self._reader = reader
        self._limits = limits
        self._room = KEPT_BLOCKS
        self._salts: dict[str, int] = {}

    def read(self, paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Log:
        """Read whole files. Raises `UsageError` for a file that cannot be read."""
        for line in lines(paths, progress):
            self.add(line)
        return self.log

    def add(self, line: SourceLine) -> None:
        """Read one line; empty lines are skipped."""
        if line.data is not None and line.data.isspace():
            return
        log = self.log
        log.lines += 1
        try:
            if line.data is None:
                raise BadLine(line.wrong)
            record = parse(line.data, self._limits.tenant_field)
            prompts = [self._prompt(content) for content in record.contents]
        except BadLine as bad:
            reason = str(bad) if str(bad) in log.bad or len(log.bad) < REASONS else OTHERS
            log.bad[reason] += 1
            if len(log.shown) < SHOWN_LINES:
                log.shown.append((line.source, line.number, str(bad)))
            return
        for content, prompt in zip(record.contents, prompts, strict=True):
            self._count(record, content, prompt, line)

    def _prompt(self, content: Content) -> KeyedPrompt:
        try:
            return self._reader.read(content)
        except TemplateRefusal as refusal:
            raise BadLine(f"chat template: {str(refusal)[:80]}") from None
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadLine(f"unreadable prompt ({type(error).__name__})") from None

    def _count(self, record: Record, content: Content, prompt: KeyedPrompt, line: SourceLine) -> None:
        log, keys = self.log, prompt.keys
        model = self._model(record.model or UNNAMED, prompt.block_tokens)
        tenant = record.tenant or UNNAMED
        if tenant not in model.tenants and len(model.tenants) >= TENANTS:
            tenant = OTHERS
        counted = model.tenants.setdefault(tenant, Tenant())
        counted.requests += 1
        counted.tokens += prompt.tokens
        counted.blocks += len(keys)
        log.requests += 1
        log.kinds.add(
            "trace" if isinstance(content, TraceBlocks) else "tokens" if isinstance(content, list) else "text"
        )
        listed: list[int] = keys.tolist()
        matched = model.shared.access(keys, listed, tenant)
        own = salted(keys, self._salt(record.tenant))
        model.apart.access(own, own.tolist(), tenant)
        text = self._reader.text(content) if self._limits.texts and matched else ""
        # The place of a token in the text is unknown: the shared text is estimated by its share of the tokens.
        text = text[: len(text) * matched * prompt.block_tokens // max(prompt.tokens, 1)]
        model.prefixes.add(listed, matched, prompt.block_tokens, f"{Path(line.source).name}:{line.number}", text)
        self._times(model, record.at)
        if len(model.kept) < self._limits.kept_requests and self._room >= len(keys):
            self._room -= len(keys)
            model.kept.append(Kept(record.at, record.tenant, prompt))
        if self._limits.method == "auto" and not log.requests & 0x3F:
            self._stay_within()

    def _model(self, name: str, block_tokens: int) -> ModelLog:
        models = self.log.models
        found = models.get(name)
        if found is not None and found.block_tokens != block_tokens:
            # Keys of a trace's ids and keys of texts cannot be compared, even for the same model.
            name = f"{name} ({block_tokens}-token blocks)"
            found = models.get(name)
        if found is None:
            if len(models) >= MODELS:
                name = f"{OTHERS} ({block_tokens}-token blocks)"
            found = models.setdefault(name, ModelLog(block_tokens, self._limits))
        return found

    def _salt(self, tenant: str) -> int:
        found = self._salts.get(tenant)
        if found is None:
            if len(self._salts) > 100_000:
                self._salts.clear()
            found = self._salts[tenant] = xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass"))
        return found

    @staticmethod
    def _times(model: ModelLog, at: float | None) -> None:
        if at is None:
            return
        model.first_at = at if model.first_at is None else min(at, model.first_at)
        model.last_at = at if model.last_at is None else max(at, model.last_at)

    def _stay_within(self) -> None:
        """Replace exact stacks by samples, the largest model's first, until the remaining ones fit."""
        models = list(self.log.models.values())
        while sum(m.shared.blocks + m.apart.blocks for m in models) > self._limits.exact_blocks:
            largest = max(models, key=lambda m: m.shared.blocks + m.apart.blocks)
            largest.shared.sample()
            largest.apart.sample()
