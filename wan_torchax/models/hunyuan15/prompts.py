"""HunyuanVideo 1.5's prompts to token ids: Qwen's of a chat, ByT5's of the texts that a prompt quotes. No JAX."""
import re

import numpy

# The indentation before each number is part of the prompt that the model was trained with.
ASPECTS = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:",
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video.",
)
SYSTEM = (" " * 9).join(ASPECTS)
CHAT = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
CROPPED = 108  # tokens before the prompt: their embeddings are not used
GLYPH_TOKENS = 256
BYTES, END = 3, 1  # ByT5's ids: of byte 0, and of the end; padding is 0


def in_chat(prompt: str) -> str:
    return CHAT.format(system=SYSTEM, prompt=prompt or " ")


def tokenize(folders, prompts: list[str], tokens: int, store) -> tuple[numpy.ndarray, ...]:
    """Ids and mask (prompts, tokens) of the whole chat."""
    from wan_torchax.models.tokens import tokenize

    return tokenize(folders["tokenizer"], [in_chat(prompt) for prompt in prompts], tokens, store)


def quoted(prompt: str) -> str | None:
    """The texts in double quotes, each once, as the model wants them; None if there are none."""
    texts = dict.fromkeys(straight or curly for straight, curly in re.findall(r'"(.*?)"|“(.*?)”', prompt))
    return ". ".join(f'Text "{text}"' for text in texts) + ". " if texts else None


def tokenize_glyphs(folders, prompts: list[str], tokens: int, store) -> tuple[numpy.ndarray, ...]:
    """Ids and mask (prompts, tokens): the bytes of the quoted texts. Without any, the mask is zero."""
    ids, mask = numpy.zeros((2, len(prompts), tokens), "int32")
    for row, text in enumerate(map(quoted, prompts)):
        if text is not None:
            given = [byte + BYTES for byte in text.encode()[: tokens - 1]] + [END]
            ids[row, : len(given)], mask[row, : len(given)] = given, 1
    return ids, mask
