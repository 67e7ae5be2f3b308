"""Text: tokenizers, chat templates, loss masks, conversations at the door, and prompts."""

from specjax.text.chat_template import ChatTemplate, Message, check_separators, encode_prompt, require_template
from specjax.text.conversations import LoadedConversations, LoadReport, SkippedRecord, load_conversations
from specjax.text.loss_mask import (
    EncodedConversation,
    check_supervised_ratio,
    encode_conversation,
    supervised_ratio,
)
from specjax.text.model_files import text_from_folder, text_from_gguf
from specjax.text.prompts import Prompt, count_turns, load_prompts, load_questions
from specjax.text.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "ChatTemplate",
    "EncodedConversation",
    "LoadReport",
    "LoadedConversations",
    "Message",
    "Prompt",
    "SkippedRecord",
    "StreamDecoder",
    "Tokenizer",
    "check_separators",
    "check_supervised_ratio",
    "count_turns",
    "encode_conversation",
    "encode_prompt",
    "load_conversations",
    "load_prompts",
    "load_questions",
    "require_template",
    "supervised_ratio",
    "text_from_folder",
    "text_from_gguf",
]
