"""`firm --help` against `python -c "import torch"`: at most half of it.

python benchmarks/startup.py
"""

from __future__ import annotations

import subprocess
import sys

from training_step import in_turn


def main() -> None:
    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    help_, torch = in_turn(7, lambda: run("-m", "firm", "--help"), lambda: run("-c", "import torch"))
    print(f"firm --help / import torch = {help_ / torch:.3f} (target: at most 0.5)")


if __name__ == "__main__":
    main()
