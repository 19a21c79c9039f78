"""Settings of the attention scores of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from sparring.errors import refusal


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Settings of one layer's causal attention, except sinks, which are weights. Mirrors `Form` in attention.h.

    Attributes:
        scale: factor on q . k.
        window: a query at position p reads the keys at p - window + 1 to p (Beltagy et al. 2020); None: all up to p.
        cap: a score becomes cap * tanh(score / cap) (Gemma 2, 2024, section 2); None: no cap.

    Raises:
        BadInput: a window or a cap is not above 0.
    """

    scale: float
    window: int | None = None
    cap: float | None = None

    def __post_init__(self) -> None:
        for name in ("window", "cap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise refusal(f"attention {name}", "a number above 0, or None", repr(value), "check the model's config")

    @property
    def numbers(self) -> tuple[float, float, int]:
        """Return scale, cap and window for the compiled kernels; 0 for None."""
        return self.scale, self.cap or 0.0, self.window or 0

    def begin(self, position: int) -> int:
        """Return the first position that a query at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)
