"""How text is cut into words before byte-level BPE, by the name that a GGUF gives.

A GGUF holds a vocabulary and its merges, and only the *name* of the rule by which text is cut before the
merges apply (`tokenizer.ggml.pre`). The rule decides ids wherever it differs from the default: in
SmolLM2 digits stand alone, so that the blank line before "1." is one token.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Llama 3, with digits one by one.
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT4O_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER_SPLITS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str, digits: bool = False) -> PreTokenizer:
    steps: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")

_BUILDERS = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion"), _gpt2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _digits_then_gpt2
    ),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), lambda: _splits(_LLAMA3_WORDS)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), lambda: _splits(_QWEN2_WORDS)),
    **dict.fromkeys(("gpt-4o", "llama4"), lambda: _splits(_GPT4O_WORDS)),
    "deepseek-coder": lambda: _splits(*_DEEPSEEK_CODER_SPLITS, digits=True),
}


def pre_tokenizer_for(name: str) -> PreTokenizer:
    """The pre-tokenizer that a GGUF calls `name`.

    Raises:
        ValueError: if the name is unknown. Cutting text by another rule would give ids that the model was
            never trained on, without any visible error, so there is no default.
    """
    if name not in _BUILDERS:
        raise ValueError(f"`tokenizer.ggml.pre` must be one of {sorted(_BUILDERS)}; got {name!r}")
    return _BUILDERS[name]()


def ignores_merges(name: str) -> bool:
    """Whether a word that is itself in the vocabulary becomes that token without looking at merges."""
    return name in _LLAMA3_NAMES
