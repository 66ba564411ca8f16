"""Where an answer ends, token by token in order, and its text, piece by piece.

A step can emit several tokens; each is looked at in turn, so an EOS or a stop string is found wherever it
stands in the block (bugs.md B01, B02), and text handed out never has to be taken back (B24).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Reason = Literal["stop", "length"]


class TextStream:
    """Text of the output so far, without incomplete characters at its end.

    Tokens are decoded together with the few before them, because pieces of a character or of a word with its
    leading space decode to something else alone. `flush` gives the rest, incomplete characters included.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoding window: ids before `start` are settled
        self._done = 0  # ids whose text has been handed out
        self._done_text = ""  # text of ids[start:done]
        self.text = ""

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        self._ids.append(token)
        window = self._decode(self._ids[self._start :])
        if window.endswith("\ufffd") or len(window) <= len(self._done_text):
            return ""
        piece = window[len(self._done_text) :]
        self._start = self._done
        self._done = len(self._ids)
        self._done_text = self._decode(self._ids[self._start :])
        self.text += piece
        return piece

    def flush(self) -> str:
        """What was held back: at the end of the answer an incomplete character is handed out as it decodes."""
        piece = self._decode(self._ids[self._start :])[len(self._done_text) :]
        self._done = self._start = len(self._ids)
        self._done_text = ""
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Stop:
    """Decides how many tokens of a block are emitted: EOS list, stop strings, length limit, in token order.

    The text of the ending EOS is left out, a stop string is cut from the text, and both end the answer with
    reason "stop" even on the last token that the limit allows.
    """

    def __init__(self, eos: Sequence[int], strings: Sequence[str], limit: int, tokenizer: Any) -> None:
        self._eos = frozenset(eos)
        self._strings = tuple(strings)
        self._limit = limit
        self._stream = TextStream(tokenizer) if tokenizer is not None else None
        self._handed = 0  # characters of text handed out
        self.emitted = 0
        self.reason: Reason | None = None
        self.text = ""

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._limit - self.emitted

    def cut(self, block: Sequence[int]) -> int:
        """How many tokens of the block belong to the answer; sets `reason` if it ends there."""
        for count, token in enumerate(block, start=1):
            self.emitted += 1
            if token in self._eos:
                self._finish("stop", None)
            else:
                self._read(token)
                if self.reason is None and self.emitted >= self._limit:
                    self._finish("length", None)
            if self.reason is not None:
                return count
        return len(block)

    def piece(self) -> str:
        """New text that can be handed out for good: not the beginning of a stop string unless the answer ended."""
        safe = len(self.text) - (0 if self.reason else self._held_back())
        new = self.text[self._handed : safe]
        self._handed = max(self._handed, safe)
        return new

    def _read(self, token: int) -> None:
        if self._stream is None:
            return
        before = len(self.text)
        self.text += self._stream.push(token)
        end = self._first_stop(before)
        if end is not None:
            self._finish("stop", end)

    def _first_stop(self, before: int) -> int | None:
        """Start of the earliest stop string that ends in the text added after `before`."""
        found = [self.text.find(s, max(0, before - len(s) + 1)) for s in self._strings]
        return min((at for at in found if at >= 0), default=None)

    def _held_back(self) -> int:
        """Length of the longest end of the text that could be the beginning of a stop string."""
        longest = max((len(s) - 1 for s in self._strings), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._strings):
                return length
        return 0

    def _finish(self, reason: Reason, end: int | None) -> None:
        self.reason = reason
        if self._stream is None:
            return
        before = len(self.text)
        self.text += self._stream.flush()
        end = self._first_stop(before) if end is None else end  # a held-back character may complete one
        if end is not None:
            self.text = self.text[:end]
            self.reason = "stop"
