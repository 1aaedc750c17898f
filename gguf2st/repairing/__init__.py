"""Mends checkpoints: turns what `verify` finds into the smallest rewrite, and runs it."""

from gguf2st.repairing.mends import Change
from gguf2st.repairing.plan import RepairPlan, Request, make_repair_plan
from gguf2st.repairing.report import RepairReport
from gguf2st.repairing.runner import repair

__all__ = ["Change", "RepairPlan", "RepairReport", "Request", "make_repair_plan", "repair"]
