"""Texts that try a tokenizer: one sentence in many languages, and a thousand strings of many scripts."""

from __future__ import annotations

import random

RIGHTS = {  # the first sentence of the Universal Declaration of Human Rights, article 1
    "English": "All human beings are born free and equal in dignity and rights.",
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Russian": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "Arabic": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "Chinese": "人人生而自由，在尊严和权利上一律平等。",
    "Japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
}
SCRIPTS = {
    "control": (0x00, 0x1F), "Latin": (0x21, 0x24F), "accents": (0x300, 0x34E), "Greek": (0x391, 0x3A1),
    "Cyrillic": (0x400, 0x44F), "Armenian": (0x561, 0x587), "Hebrew": (0x5D0, 0x5EA),
    "Arabic": (0x621, 0x64A), "Devanagari": (0x904, 0x939), "Bengali": (0x995, 0x9A8),
    "Tamil": (0xB85, 0xB8A), "Thai": (0xE01, 0xE30), "Georgian": (0x10D0, 0x10F0),
    "Ethiopic": (0x1200, 0x1246), "Runic": (0x16A0, 0x16EA), "spaces": (0x2000, 0x200A),
    "fractions": (0x2150, 0x2188), "arrows": (0x2190, 0x21FF), "mathematics": (0x2200, 0x22FF),
    "hiragana": (0x3041, 0x3096), "katakana": (0x30A1, 0x30FA), "Chinese": (0x4E00, 0x9FA5),
    "Korean": (0xAC00, 0xD7A3), "pictures": (0x1F300, 0x1F5FF), "emoji": (0x1F600, 0x1F64F),
}  # fmt: skip


def many_texts(seed: int = 0) -> list[str]:
    """More than a thousand texts: every script alone and mixed, spaces, digits, controls, markers."""
    draw = random.Random(seed)
    glue = [" ", "  ", "\n", "\t", "\r\n", "\u00a0", "1", "2024", "'s", ".", "<|im_end|>", "👍🏽", "👩‍👩‍👧‍👦"]
    letters = [[chr(code) for code in range(first, last + 1)] for first, last in SCRIPTS.values()]
    texts = ["", *RIGHTS.values(), *glue, *map(chr, range(256))]
    for script in letters:
        texts += ["".join(draw.choices(script, k=draw.randint(1, 24))) for _ in range(20)]
    while len(texts) < 1200:
        kinds = draw.choices(letters, k=4)
        parts = ["".join(draw.choices(kind, k=draw.randint(0, 6))) + draw.choice(glue) for kind in kinds]
        texts.append("".join(parts))
    return texts
