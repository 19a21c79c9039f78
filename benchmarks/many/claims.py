"""Figures of benchmarks/scale.py with their targets."""

from __future__ import annotations

Claims = list[dict[str, object]]


def claim(name: str, value: float, unit: str, target: float, direction: str = "<=") -> dict[str, object]:
    """One figure with its target."""
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, "direction": direction}
