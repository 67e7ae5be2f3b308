"""Slow, literal NumPy versions of the verification rules, written independently of `specjax.verification`.

They follow the algorithms as they are stated, one draft at a time, and give exact laws of the first iteration
(`token`, `block`, `spectr`, `recursive_rejection`, `traversal`, closed forms of the latent-time rules) or decide on
given noise (`latent_times`). They exist to be compared with.
"""
