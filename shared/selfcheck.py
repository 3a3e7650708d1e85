"""`python -m shared.selfcheck`: one sentence from the real model through the whole engine, or a reason why not."""
from __future__ import annotations

import sys
import time

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def main() -> int:
    started = time.perf_counter()
    try:
        from shared import LLM, EngineError, SamplingParams
    except ImportError as error:
        print(f"self-check failed: a package is missing ({error}); run `make lab` again", file=sys.stderr)
        return 1
    try:
        llm = LLM()
        greedy = SamplingParams(temperature=0, max_tokens=40)
        answer = llm.chat([{"role": "user", "content": QUESTION}], greedy)[0].outputs[0].text
    except EngineError as error:
        print(f"self-check failed: {error}", file=sys.stderr)
        return 1
    print(f"{QUESTION} — {answer}   [SmolLM2-135M on our engine, {time.perf_counter() - started:.1f} s]")
    return 0 if answer.strip() == ANSWER else 1


if __name__ == "__main__":
    sys.exit(main())
