"""What was taken over, and what was not, and why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Record:
    """Layers by name: of those taken what runs, of those left why. It prints as a table."""

    taken: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.taken)} LoKr layers taken over, {len(self.left)} left to their own code"]
        for mark, layers in (("taken", self.taken), ("left", self.left)):
            names: dict[str, list[str]] = {}
            for name, words in layers.items():
                names.setdefault(words, []).append(name)
            for words, alike in names.items():
                count = f"{alike[0]} and {len(alike) - 1} more" if len(alike) > 1 else alike[0]
                lines.append(f"  {mark}: {count}: {words}")
        return "\n".join(lines)
