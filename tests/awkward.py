"""Texts that cleaners and tokenizers may disagree about, generated: the same list in every process."""
from random import Random

WORDS = (
    "a", "red", "star", "moving", "Left", "naïve", "café", "ﬁlm", "\uff11\uff12\uff13", "Straße", "ΑΒΓ", "静止",
    "模糊", "赤い", "별", "نجمة", "כוכב",
)
BROKEN = (
    "cafÃ©", "\xe2\u20ac\u0153quoted\xe2\u20ac\x9d", "schÃ¶n", "\xc3\xa2\xe2\u201a\xac\xe2\u201e\xa2",
    "l\u2019humanit\xc3\xa9", "\xef\xbc\x88", "\ufeff", "\u2714 No problems", "\xe2\u0153\u201d No",
)
ENTITIES = (
    "&amp;", "&amp;amp;", "&lt;b&gt;", "&eacute;", "&#233;", "&#x1F600;", "&nbsp;", "&quot", "&notanentity;",
    "&",
)
SPACES = (
    " ", "  ", "\t", "\n", "\r\n", "\xa0", "\u2003", "\u200b", "\u3000", "\x0b", "\x0c", "\x1c", "\x85",
    "\u2028",
)
SIGNS = (
    "\U0001f642", "\U0001f469\u200d\U0001f680", "\U0001f1e9\U0001f1ea", "e\u0301", "a\u0300\u0301", "½",
    "\u2026", "\u2014", "\u2018", "\x00", "\x07", "\x1b[31m", "\u202e", "\U0010fffd", "Ǆ",
)
TOKENS = (
    "</s>", "<pad>", "<unk>", "<extra_id_0>", "\u2581", "_", "<s>", "</S>", "< /s>",
)
KINDS = (WORDS, WORDS, BROKEN, ENTITIES, SPACES, SPACES, SIGNS, TOKENS)


def texts(count: int = 500) -> list[str]:
    random, listed = Random(7), ["", " ", "\n\t", "a red star", "x" * 3000, "red circle " * 600, "&amp;" * 400]
    while len(listed) < count:
        length = random.choice((1, 2, 3, 5, 8, 20, 60))
        listed.append("".join(random.choice(random.choice(KINDS)) for _ in range(length)))
    return listed
