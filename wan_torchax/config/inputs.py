"""What the user gives a pipeline: texts, typed or from files. No JAX, no torch."""
from pathlib import Path

from omegaconf import DictConfig

from wan_torchax.config.commandline import literal


def with_texts(config: DictConfig) -> DictConfig:
    """The config with the texts of its prompt files in it, as if they had been typed."""
    texts, prompt = config.copy(), config.prompt
    for key, file in (("text", prompt.file), ("negative", prompt.negative_file)):
        text = prompt[key] if file is None else Path(file).read_text(encoding="utf-8")
        texts.prompt[key] = literal((text or "").strip())
    texts.prompt.file = texts.prompt.negative_file = None
    return texts
