"""From answers to a saved head: what `headstart train` does, as one function over plain parts.

Data -> held-out answers -> draft vocabulary -> features -> training -> tree -> checkpoint. Every part is filed under a
hash of what it depends on, so the same call goes on where it was.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart._version import __version__
from headstart.catalogue import family
from headstart.checkpoint import Loaded, save
from headstart.core import Report
from headstart.errors import BadInput
from headstart.heads.base import Head
from headstart.heldout import HeldOut
from headstart.prompts import packaged
from headstart.replay import Replayed
from headstart.targets.base import Target
from headstart.train.answers import Row, read_answers, summary, user_text
from headstart.train.capture import Live, Texts, Window, capture
from headstart.train.distil import Given, distil
from headstart.train.files import write_json
from headstart.train.fingerprint import fingerprint, of_tensors, of_text
from headstart.train.grams import Seen
from headstart.train.loop import Training, train
from headstart.train.plot import plot
from headstart.train.readers import packaged_chats, read
from headstart.train.rollout import How
from headstart.train.state import METRICS, Progress
from headstart.train.template import OnLong, Sample, fit, sample
from headstart.vocab.base import DraftVocab
from headstart.vocab.build import build, count_tokens, coverage, forced_ids
from headstart.vocab.full import Full

HELD_OUT = How(max_new_tokens=128, cut_loops=False)
HELD_OUT_SHARE = 0.02  # of the answers, where the packaged prompts cannot be asked (no chat template)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All choices of a run. `head` are the fields of the family's config; `draft_vocab` None drafts every token."""

    training: Training
    family: str = "medusa"
    head: dict[str, Any] = field(default_factory=dict)
    draft_vocab: int | None = 8192
    tree_nodes: int = 32
    stored: str = "auto"
    on_the_fly: bool = False
    on_long: OnLong = "cut"


class Data(NamedTuple):
    """Texts to train on and answers to measure on; `report` says what they are."""

    samples: list[Sample]
    held_out: list[Sample]
    report: dict[str, Any]


class Fitted(NamedTuple):
    """The head as chosen, its tree, and what it reached on the held-out answers."""

    head: Head
    vocab: DraftVocab
    paths: list[tuple[int, ...]]
    progress: Progress
    held_out: Replayed


def of_row(row: Row) -> Sample:
    """A distilled answer as training text: the ids that the target saw and said."""
    return Sample(row.prompt_ids + row.response_ids, [False] * len(row.prompt_ids) + [True] * len(row.response_ids))


def gather(
    target: Target, sources: Sequence[Path], cache: Path, *, on_long: OnLong = "cut", on_bad: Any = "refuse",
    report: Report | None = None,
) -> Data:  # fmt: skip
    """Read directories of answers (`headstart distill`) and files of chats with answers; answer the held-out prompts.
    Texts whose prompt shares a run of 8 words with a held-out one are left out, and counted.

    Raises BadInput for what cannot be read, or if nothing supervised is left.
    """
    folders = [path for path in sources if path.is_dir()]
    rows = read_answers(*folders) if folders else []
    kept_back = Seen(user_text(p.messages) for p in packaged())
    clear = [row for row in rows if not kept_back.overlaps(user_text(row.messages))]
    samples = [of_row(row) for row in clear if len(row.response_ids) > 1]
    notes: dict[str, Any] = {"answers": summary(rows)._asdict() if rows else None, "files": {}}
    too_like = len(rows) - len(clear)
    for path in (path for path in sources if not path.is_dir()):
        reading = read(path, on_bad=on_bad)
        answered = [chat for chat in reading.chats if any(m["role"] == "assistant" for m in chat.messages)]
        chats = [chat for chat in answered if not kept_back.overlaps(user_text(chat.messages))]
        too_like += len(answered) - len(chats)
        samples += [sample(target.tokenizer, chat.messages) for chat in chats]
        notes["files"][path.name] = {"chats": len(chats), "skipped": len(reading.skipped)}
    samples, cut, dropped = fit(samples, target.can.max_positions, on_long=on_long)
    notes |= {
        "cut": cut,
        "dropped": dropped,
        "too_like_held_out": too_like,
        "supervised": sum(sum(s.supervised) for s in samples),
    }
    if getattr(target.tokenizer, "chat_template", None):
        held_out = held_out_answers(target, cache, report)
    else:
        share = max(1, int(HELD_OUT_SHARE * len(samples)))
        samples, held_out = samples[share:], samples[:share]
    if not samples or not held_out:
        raise BadInput("No supervised text is left to train on; make more answers with `headstart distill`.")
    return Data(samples, held_out, notes)


def held_out_answers(target: Target, cache: Path, report: Report | None = None) -> list[Sample]:
    """The target's greedy answers to the packaged held-out prompts, made once per target."""
    folder = cache / "held-out" / fingerprint(target)
    source = Given(packaged_chats(), unit=64, name="held-out", held_out=True)
    distil(target, source, folder, HELD_OUT, report=report)
    return [of_row(row) for row in read_answers(folder) if len(row.response_ids) > 1]


def fitted(
    target: Target,
    target_name: str,
    data: Data,
    recipe: Recipe,
    out: Path,
    cache: Path,
    *,
    start: Loaded | None = None,
    report: Report | None = None,
    until: float | None = None,
) -> Fitted:
    """Capture, train, choose, grow the tree, and save the head in `out/head`. `start` is a head to go on from."""
    if start is not None:
        vocab, head = start.vocab, start.head.to(target.device, torch.float32).train()
    else:
        vocab = draft_vocab(target, data.samples, recipe.draft_vocab)
        head = new_head(target, vocab, recipe)
    texts, held = captured(target, data, head, recipe, cache, report)
    parts = HeldOut(target, head, vocab, held, depths=len(recipe.training.weights), nodes=recipe.tree_nodes)
    record = {
        "family": recipe.family,
        "head": asdict(head.config),
        "target": fingerprint(target),
        "data": of_text([s.ids for s in data.samples]),
        "vocab": None if vocab.ids_U is None else of_text(vocab.ids_U.tolist()),
        "start": None if start is None else of_tensors(head.state_dict().items()),
    }
    write_json(out / "provenance.json", {"argv": argv(), "versions": versions(), "data": data.report, **record})
    before = parts.measure(head) if start is not None and not (out / "run.json").exists() else None
    if before is not None:
        write_json(out / "before.json", before._asdict())
    progress = train(
        head, texts, recipe.training, out,
        readout=parts.readout, vocab=vocab, evaluate=parts.measure, record=record, report=report, until=until,
    )  # fmt: skip
    plot(out / METRICS, out / "curves.png")
    head.eval()
    paths = parts.tree()
    result = parts.replay(paths)
    card = {
        "tokens": progress.tokens,
        "chosen_at_tokens": progress.best_tokens,
        "held_out_tokens_per_step": round(result.tokens_per_step, 4),
        "held_out_prompts": len(held),
        "tree_nodes": len(paths) + 1,
        "data": data.report,
        "data_hash": record["data"],
        "versions": versions(),
        "argv": argv(),
    }
    save(out / "head", head, recipe.family, target=target, target_name=target_name, vocab=vocab, paths=paths, card=card)
    return Fitted(head, vocab, paths, progress, result)


def new_head(target: Target, vocab: DraftVocab, recipe: Recipe) -> Head:
    """An untrained head; its weights follow from the recipe's seed and the target."""
    kind = family(recipe.family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)
        head = kind.head(kind.config(**recipe.head), target.width, vocab.size)
    head = head.to(target.device, torch.float32).train()
    head.adopt(_head_rows(target, vocab), vocab.ids_U)
    return head


@torch.no_grad()
def _head_rows(target: Target, vocab: DraftVocab) -> Tensor:
    """`[U, D]`, read off the head itself: a packed one shows no rows. Differs where a soft-cap bends the logits."""
    unit_DD = torch.eye(target.width, device=target.device, dtype=target.can.dtype)
    return target.readout(vocab.ids_U).project(unit_DD).T.float()


def draft_vocab(target: Target, samples: Sequence[Sample], size: int | None) -> DraftVocab:
    """The most frequent of the target's own tokens, with what must always be there; all of them for None."""
    real = min(len(target.tokenizer), target.vocabulary.size)
    if size is None or size >= real:
        return Full(target.vocabulary.size)
    said = [[i for i, s in zip(x.ids, x.supervised, strict=True) if s] for x in samples]
    counts_V = count_tokens(said, target.vocabulary.size)
    return build(counts_V, size, forced_ids(target.tokenizer, target.eos), real)


def vocab_report(target: Target, samples: Sequence[Sample], vocab: DraftVocab) -> float:
    """Share of supervised tokens that can be drafted."""
    said = [[i for i, s in zip(x.ids, x.supervised, strict=True) if s] for x in samples]
    return coverage(count_tokens(said, target.vocabulary.size), vocab)


def captured(
    target: Target, data: Data, head: Head, recipe: Recipe, cache: Path, report: Report | None
) -> tuple[Texts, Texts]:
    """Features of the training texts and of the held-out answers."""
    stored = stored_as(target, recipe.stored)
    window = window_of(head, len(recipe.training.weights))
    place = cache / "features"
    if recipe.on_the_fly:
        return Live(target, data.samples, head.needs, window), Live(target, data.held_out, head.needs, window)
    texts = capture(target, data.samples, head.needs, place, window=window, stored=stored, report=report)
    held = capture(target, data.held_out, head.needs, place, window=window, stored=stored, report=report)
    return texts, held


def window_of(head: Head, depths: int) -> Window:
    """A head that sees its anchor alone needs nothing of the prompt but the last rows."""
    return Window(before=depths + 1 if head.alone else None)


def stored_as(target: Target, stored: str) -> str:
    """Number format of features on disk: for "auto" the target's own."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names[target.can.dtype] if stored == "auto" else stored


def argv() -> list[str]:
    """The command, without the path of the program on this machine."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def versions() -> dict[str, str]:
    """What a result may depend on."""
    names = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {
        "headstart": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "date": time.strftime("%Y-%m-%d"),
    }
