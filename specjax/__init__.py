"""Draft models for speculative decoding: training, exact verification, measurement."""
