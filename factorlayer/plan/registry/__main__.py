"""Prints the registry: of each family what it is for, what it takes, and its margin beside others."""

from factorlayer.plan.registry import KINDS

for kind, families in KINDS.items():
    print(f"\n{kind}")
    for each in families:
        print(f"  {each.name:24}{each.about}\n{'':26}{each.takes}")
        if each.margin.source:
            print(f"{'':26}predicted times count {each.margin}")
