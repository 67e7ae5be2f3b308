"""Decoding: laws, requests and the engine."""

from specjax.decoding.engine import DecodingTarget, Engine, RunStatistics
from specjax.decoding.laws import LawParams, finite_logits, sample_law, to_log_laws
from specjax.decoding.request import Completion, Request, SamplingParams, StepRecord, StreamEvent

__all__ = [
    "Completion",
    "DecodingTarget",
    "Engine",
    "LawParams",
    "Request",
    "RunStatistics",
    "SamplingParams",
    "StepRecord",
    "StreamEvent",
    "finite_logits",
    "sample_law",
    "to_log_laws",
]
