"""Any Hugging Face causal LM as a target, through stock transformers code.

No modelling code is copied: the tree travels as a 4-D mask with explicit positions, the cache is ours. Whether a
model honours both is not looked up by name but probed once when it is loaded. A new transformers release is met
in the `hf*.py` files: no others touch its models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from headstart.core import Features, Readout, Taps
from headstart.errors import BadInput, Unsupported
from headstart.targets import hf_attention
from headstart.targets.base import Capabilities, Rows, Vocabulary
from headstart.targets.hf_cache import TreeCache
from headstart.targets.hf_mask import Windows, visible, within
from headstart.tree import Tree, chain, from_parents

PROBE_TOLERANCE = 0.2  # root mean square, of the logits' spread; bf16 rounding of 30 layers was seen at 0.07


class HFTarget:
    """See `targets.base.Target`. `path` is the directory that the weights came from, None for one made in memory."""

    def __init__(self, model: Any, tokenizer: Any, path: Path | None = None) -> None:
        """Wrap a loaded model in eval mode and probe what it can do; raises Unsupported with the reason."""
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.path = path
        self.config: Any = self.model.config.get_text_config()
        self.base: Any = self.model.base_model
        self.head: Any = self.model.get_output_embeddings()
        if self.head is None or self.base is self.model:
            raise Unsupported(f"{type(model).__name__} has no separate LM head; headstart needs a causal LM.")
        self.device = next(self.model.parameters()).device
        self.width = int(self.config.hidden_size)
        self.layers = int(self.config.num_hidden_layers)
        self.cap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.eos = _eos_ids(self.model, tokenizer)
        self.vocabulary = Vocabulary.of(self._head_rows(), _tokens(tokenizer))
        self._layers = _decoder_layers(self.base, self.config.num_hidden_layers)
        self._window = Windows(self.config)
        self._max_positions = int(getattr(self.config, "max_position_embeddings", 0) or 2**31)
        self._sdpa = self.config._attn_implementation == "sdpa"
        self._per_node = self._sdpa and hf_attention.wanted(self.model.dtype, self.device)
        if self._sdpa and self.device.type == "cpu":
            self.model.set_attn_implementation(hf_attention.PER_NODE if self._per_node else hf_attention.GROUPED)
        self.can = self._probe()

    def empty(self, n_requests: int) -> TreeCache:
        """A cache with nothing committed."""
        return TreeCache(self.config.num_hidden_layers, n_requests)

    @torch.inference_mode()
    def extend(self, cache: TreeCache, token_BN: Tensor, tree: Tree, needs: Taps) -> tuple[Rows, Features]:
        """One pass; see `Target.extend`. What it returns are inference tensors: clone them to train on them."""
        n_nodes = token_BN.shape[1]
        exact = self._per_node and len(token_BN) == 1 and n_nodes <= hf_attention.NODES and tree.sees_BNN is None
        if exact and n_nodes == 1:  # one row takes another matmul kernel than several: run it twice, keep the first
            token_BN, tree = token_BN.expand(-1, 2), chain(1, 2, self.device)
        slots = cache.reserve(token_BN.shape[1], hf_attention.KEYS if exact else 1)
        start_B1 = torch.tensor(cache.lengths, device=self.device)[:, None]
        # padding beside a row that is at the end of the context must not ask for a position beyond it
        position_BN = (start_B1 + tree.depth_BN).clamp(max=self._max_positions - 1)
        with self._caught(needs.layers) as layers:
            out = self.base(
                input_ids=token_BN,
                attention_mask=self._mask(cache, tree, position_BN, slots, exact),
                position_ids=position_BN,
                cache=cache,
                use_cache=True,
            )
        final_BND = out.last_hidden_state[:, :n_nodes]
        layers_BND = tuple(layer[:, :n_nodes] for layer in layers())
        return Rows(final_BND, self.project), Features(final_BND if needs.final else None, layers_BND)

    def commit(self, cache: TreeCache, kept: Sequence[Sequence[int]]) -> TreeCache:
        """One gather of the kept path; see `Target.commit`."""
        cache.keep(kept)
        return cache

    def select(self, cache: TreeCache, requests: Sequence[int]) -> TreeCache:
        """Keep only these requests."""
        cache.rows(requests)
        return cache

    def replace(self, cache: TreeCache, requests: Sequence[int], other: TreeCache) -> TreeCache:
        """Put the requests of `other` in the places of these."""
        cache.replace(requests, other)
        return cache

    def rewind(self, cache: TreeCache, lengths: Sequence[int]) -> TreeCache:
        """Forget committed tokens beyond `lengths`."""
        cache.rewind(lengths)
        return cache

    @torch.no_grad()
    def embed(self, token: Tensor) -> Tensor:
        """Through the module, never `.weight`: Gemma scales inside it, packed weights have no plain rows."""
        return cast(Tensor, self.model.get_input_embeddings()(token))

    @torch.inference_mode()
    def project(self, hidden_RD: Tensor) -> Tensor:
        """LM head with soft-cap, `[R, D] -> [R, V]`; the final norm has run already."""
        if self._per_node and len(hidden_RD) == 1:  # as in `extend`: several rows' kernel also for one
            return self.project(hidden_RD.expand(2, -1))[:1]
        return self._capped(self.head(hidden_RD))

    def readout(self, ids_U: Tensor | None = None) -> Readout:
        """The LM head as a part that heads borrow, in the model's dtype; chosen rows are copied out once."""
        dtype = self.can.dtype
        if ids_U is None:
            return Readout(lambda hidden_RD: self._capped(self.head(hidden_RD.to(dtype))), self.vocabulary.size)
        self.can.demand("gather_head_rows", "A trimmed draft vocabulary")
        index_U = ids_U.to(self.device)
        weight_UD = self.head.weight.detach()[index_U]
        bias_U = None if self.head.bias is None else self.head.bias.detach()[index_U]
        return Readout(
            lambda h: self._capped(nn.functional.linear(h.to(dtype), weight_UD, bias_U)), len(ids_U), index_U
        )

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers by name; a tied tensor once."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def _mask(self, cache: TreeCache, tree: Tree, position_BN: Tensor, slots: int, exact: bool) -> Any:
        """What each node sees: all committed slots of its request, and its ancestors in this pass.

        None (the causal mask of SDPA itself) where that says the same: a first pass, or one node of one request.
        """
        n_nodes = position_BN.shape[1]
        fresh = max(cache.lengths) == 0
        lone = n_nodes == 1 and cache.uniform
        plain = self._sdpa and tree.sees_BNN is None and (fresh or lone) and not exact
        end = max(cache.lengths) + n_nodes
        sees_BNS: Tensor | None = None

        def of(window: int | None) -> Tensor | None:
            nonlocal sees_BNS
            if plain and (window is None or end <= window):
                return None
            if sees_BNS is None:
                sees_BNS = visible(cache, tree, position_BN)
            mask_BNS = sees_BNS
            if window is not None and end > window:
                mask_BNS = mask_BNS & within(cache, tree, position_BN, end, window)
            padding = slots - mask_BNS.shape[2]
            return self._as_mask(torch.nn.functional.pad(mask_BNS, (0, padding))[:, None])

        return self._window.masks(of)

    def _as_mask(self, mask: Tensor) -> Tensor:
        if self._sdpa:
            return mask
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    @contextmanager
    def _caught(self, layers: tuple[int, ...]) -> Iterator[Callable[[], list[Tensor]]]:
        """Record the residual stream after the given numbers of decoder layers during one pass."""
        seen: dict[int, Tensor] = {}

        def keep(count: int, value: Any) -> None:
            seen[count] = value[0] if isinstance(value, tuple) else value

        hooks = [
            self._layers[0].register_forward_pre_hook(
                lambda _m, args, kwargs: keep(0, args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            if count == 0
            else self._layers[count - 1].register_forward_hook(lambda _m, _a, out, c=count: keep(c, out))
            for count in self._checked(layers)
        ]
        try:
            yield lambda: [seen[count] for count in layers]
        finally:
            for hook in hooks:
                hook.remove()

    def _checked(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        if layers and not 0 <= min(layers) <= max(layers) <= len(self._layers):
            raise BadInput(f"Taps {layers} ask for layers that do not exist: this target has 0..{len(self._layers)}.")
        return layers

    def _head_rows(self) -> int:
        weight = getattr(self.head, "weight", None)
        return int(weight.shape[0]) if weight is not None else int(self.config.vocab_size)

    @torch.inference_mode()
    def _probe(self) -> Capabilities:
        """Ask the model itself: does it follow a tree mask with explicit positions, and our cache?

        Two sibling continuations in one tree pass must give the logits that stock passes over each path give.
        """
        vocab = self._head_rows()
        a, b, c, d = (int(vocab * f) for f in (0.13, 0.31, 0.53, 0.79))
        token = [torch.tensor([row], device=self.device) for row in ([a, b, c], [a, b, d])]
        reasons: dict[str, str] = {}
        if self._window.unknown or getattr(self.model, "_is_stateful", False):
            reasons["rollback"] = (
                f"it keeps a recurrent state ({', '.join(self._window.unknown) or 'stateful model'}), "
                "which cannot be rolled back to an earlier token"
            )
        else:
            expected = [self.model(input_ids=t, use_cache=False).logits[0, -1] for t in token]
            spread = torch.stack(expected).float().std()
            cache = self.empty(1)
            self.extend(cache, token[0][:, :1], chain(1, 1, self.device), Taps())
            cache = self.commit(cache, [[0]])
            rows, _ = self.extend(cache, token[0][:, 1:], chain(1, 2, self.device), Taps())
            if not _close(rows.logits_RNV([0])[0, 1], expected[0], spread):
                reasons["rollback"] = "its logits through an external cache differ from its own"
            tree = from_parents(torch.tensor([[0, 0, 0]], device=self.device))
            rows, _ = self.extend(cache, torch.tensor([[b, c, d]], device=self.device), tree, Taps())
            found = rows.logits_RNV([0])[0, 1:]
            flat = torch.tensor([[a, b, c, d]], device=self.device)  # as if siblings saw each other
            wrong = self.model(input_ids=flat, use_cache=False).logits[0, -1]
            follows = _distance(found[1], expected[1]) < _distance(found[1], wrong)
            if not (follows and all(_close(x, y, spread) for x, y in zip(found, expected, strict=True))):
                reasons["tree"] = "it does not follow a 4-D tree mask with explicit positions"
        weight = getattr(self.head, "weight", None)
        plain_head = weight is not None and weight.is_floating_point() and weight.dim() == 2
        if not plain_head:
            reasons["gather_head_rows"] = "its LM head is packed or wrapped, so rows cannot be picked"
        return Capabilities(
            tree="tree" not in reasons and "rollback" not in reasons,
            rollback="rollback" not in reasons,
            taps=self._layers is not None,
            gather_head_rows=plain_head,
            trainable=plain_head,
            max_positions=self._max_positions,
            max_nodes=1024,
            max_batch=256,
            dtype=next(self.model.parameters()).dtype,
            same_bits=self._per_node and "rollback" not in reasons and self._same_bits(),
            reasons=reasons,
        )

    def _same_bits(self) -> bool:
        """Does a chain of several nodes give the same bits as its tokens one by one, for a few widths?"""
        vocab = self._head_rows()
        token_BN = torch.tensor([[(7 + 31 * i) % vocab for i in range(26)]], device=self.device)

        def states(widths: Sequence[int]) -> Tensor:
            cache, out = self.empty(1), []
            for width in widths:
                run_BN = token_BN[:, cache.lengths[0] : cache.lengths[0] + width]
                rows, _ = self.extend(cache, run_BN, chain(1, width, self.device), Taps())
                out.append(self.project(rows.hidden_BND[0]))
                cache = self.commit(cache, [range(width)])
            return torch.cat(out[1:])

        one_by_one = states([9, *[1] * 17])
        return all(torch.equal(one_by_one, states(widths)) for widths in ([9, 17], [9, 2, 10, 5]))


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).pow(2).mean().sqrt())


def _close(found: Tensor, expected: Tensor, spread: Tensor) -> bool:
    return _distance(found, expected) <= PROBE_TOLERANCE * float(spread)


def _decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    for module in base.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise Unsupported(f"{type(base).__name__} has no list of {count} decoder layers to tap.")


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Stop ids: the generation config's list if there is one, else the tokenizer's."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(tokenizer, "eos_token_id", None)
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _tokens(tokenizer: Any) -> list[str]:
    """Text form of every id of the tokenizer, in id order; ids that it skips are empty."""
    if tokenizer is None:
        return []
    by_id = {i: t for t, i in tokenizer.get_vocab().items()}
    return [by_id.get(i, "") for i in range(max(by_id, default=-1) + 1)]
