"""No command, option, choice, recipe key or default of an earlier version is lost."""

import json
from pathlib import Path

from snapshot_commands import commands, lost, recipe_keys, schema

HERE = Path(__file__).parent


def test_no_command_option_choice_or_default_is_lost():
    kept = json.loads((HERE / "commands.json").read_text())
    assert len(kept) == 46
    assert not list(lost(kept, commands()))


def test_no_key_of_recipes_is_lost():
    kept = json.loads((HERE / "recipe_keys.json").read_text())
    assert not list(lost(kept, recipe_keys(schema()), "recipe: "))


def test_a_loss_would_be_seen():
    kept = commands()
    found = json.loads(json.dumps(kept))
    del found["doctor"]
    del found["compress"]["--level"]
    found["verify"]["--threads"] |= {"type": "text", "min": 3, "required": True}
    found["space edit"]["--unit"] |= {"choices": ["raw"], "default": "raw"}
    found["attack embedding"]["--steps"]["default"] = 100
    assert sorted(lost(kept, found)) == [
        "netweight attack embedding --steps: the default is 100, not '400'",
        "netweight compress --level is gone",
        "netweight doctor is gone",
        "netweight space edit --unit: the choices ['deviations', 'reach'] are gone",
        "netweight space edit --unit: the default is 'raw', not 'deviations'",
        "netweight verify --threads is required now",
        "netweight verify --threads: min is 3, not 1",
        "netweight verify --threads: type is 'text', not 'integer'",
    ]
