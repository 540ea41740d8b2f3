"""Chats for benchmarks: lognormal lengths, several languages and scripts, code.

    python tools/bench/chats.py 20000 chats.jsonl

The same number of rows gives the same bytes. A row has about 2 KiB, as in public mixtures.
"""

import json
import sys
from pathlib import Path

import numpy as np

LATIN = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "model",
    "token",
    "learning",
    "data",
    "training",
    "loss",
    "gradient",
    "step",
    "batch",
    "attention",
    "layer",
    "weight",
    "optimizer",
    "schedule",
    "because",
    "therefore",
    "however",
    "which",
    "would",
    "could",
    "should",
    "number",
    "answer",
    "question",
    "explain",
    "simple",
    "example",
    "result",
    "compare",
    "between",
    "under",
    "over",
    "after",
    "before",
    "again",
    "memory",
    "device",
    "straße",
    "größe",
    "über",
    "schließlich",
    "naïve",
    "café",
    "déjà",
    "façade",
    "señor",
    "mañana",
    "coração",
    "ação",
    "łódź",
    "žluťoučký",
    "İstanbul",
    "çiçek",
    "ağaç",
    "Việt",
    "Nam",
    "tiếng",
    "người",
]
SCRIPTS = [
    ["модель", "учится", "на", "данных", "и", "шаг", "за", "шагом", "уменьшает", "ошибку"],
    ["μοντέλο", "μαθαίνει", "από", "δεδομένα", "και", "βήμα", "προς", "βήμα"],
    ["모델은", "데이터에서", "배우고", "단계마다", "손실을", "줄인다"],
    ["النموذج", "يتعلم", "من", "البيانات", "خطوة", "بعد", "خطوة"],
    ["मॉडल", "डेटा", "से", "सीखता", "है", "और", "हर", "कदम", "पर", "त्रुटि", "घटाता", "है"],
    ["模型", "从", "数据", "中", "学习", "每", "一步", "减少", "误差", "语言", "注意力", "机制"],
    ["モデルは", "データから", "学び", "一歩ずつ", "誤差を", "減らす"],
    ["😀", "🚀", "👩\u200d💻", "🧪", "✅", "📈"],
]
CODE = """```python
def step{n}(model, batch):
    loss = model(**batch).loss / {n}
    loss.backward()
    return {{"loss": float(loss), "n": {n}}}
```"""


def main(rows: int, path: Path) -> None:
    """Write `rows` chats."""
    dice = np.random.Generator(np.random.Philox(7))
    with path.open("w", encoding="utf8") as file:
        for _ in range(rows):
            file.write(json.dumps({"messages": make_chat(dice)}, ensure_ascii=False) + "\n")


def make_chat(dice: np.random.Generator) -> list[dict[str, str]]:
    """Return one conversation."""
    turns = []
    if dice.random() < 0.3:
        turns.append({"role": "system", "content": "You are a careful and friendly assistant."})
    for _ in range(1 + int(dice.poisson(1.2))):
        turns.append({"role": "user", "content": make_text(dice, 2.8)})
        turns.append({"role": "assistant", "content": make_text(dice, 4.1)})
    return turns


def make_text(dice: np.random.Generator, size: float) -> str:
    """Return a text: a fifth of the texts use another script, a tenth end with code."""
    count = int(np.clip(dice.lognormal(size, 0.9), 1, 4_000))
    pool = SCRIPTS[int(dice.integers(len(SCRIPTS)))] if dice.random() < 0.2 else LATIN
    words = [pool[n] for n in dice.integers(len(pool), size=count)]
    # Random letters and digits, which no vocabulary has.
    for index in dice.integers(count, size=count // 15):
        words[index] = np.base_repr(int(dice.integers(1 << 40)), 36).lower()[: 2 + index % 7]
    for index in dice.integers(count, size=count // 12):
        words[index] += ".\n" if index % 3 else ","
    if dice.random() < 0.1:
        words.append("\n" + CODE.format(n=count))
    return " ".join(words)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
