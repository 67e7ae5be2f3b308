"""Times of a speculative step worked out from shapes and a hardware table, before anything is trained.

`plan_heads` is the way in; `docs/plan.md` says what it predicts and how well.
"""

from specjax.roofline.hardware import HARDWARE, Hardware, get_hardware, read_hardware
from specjax.roofline.head_shapes import HEAD_KINDS, HeadShape, head_family, head_work
from specjax.roofline.passes import DrafterShape, Setting, cycle_work, step_time
from specjax.roofline.planning import HeadPlan, Plan, expected_rho_tau, plan_heads, recommend_rank
from specjax.roofline.target_shapes import TargetShape, load_target_shape
from specjax.roofline.work import Work

__all__ = [
    "HARDWARE",
    "HEAD_KINDS",
    "DrafterShape",
    "Hardware",
    "HeadPlan",
    "HeadShape",
    "Plan",
    "Setting",
    "TargetShape",
    "Work",
    "cycle_work",
    "expected_rho_tau",
    "get_hardware",
    "head_family",
    "head_work",
    "load_target_shape",
    "plan_heads",
    "read_hardware",
    "recommend_rank",
    "step_time",
]
