"""Every shaping rule by name: what changes rewards between scoring and credit."""

from __future__ import annotations

from sparring.algo.shaping.linear_length import LinearLength
from sparring.algo.shaping.overlong import Overlong
from sparring.algo.shaping.relative_length import RelativeLength
from sparring.algo.shaping.stop_properly import StopProperly

ShapingRule = LinearLength | Overlong | RelativeLength | StopProperly
