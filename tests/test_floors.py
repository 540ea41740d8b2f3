"""The architecture: rooms, sizes, names, and the cost of imports."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

import plugsft
from plugsft import data_kit, kit
from plugsft.recipe.capabilities import SUGGESTED
from plugsft.registry.contracts import SPECS
from plugsft.registry.discover import find

HOUSE = ROOT / "plugsft"
MODULES = sorted(
    path
    for path in HOUSE.rglob("*.py")
    if not {"plugins", "skeleton_files"} & {*path.relative_to(HOUSE).parts}
    and not (path.name == "__init__.py" and path.parent not in (HOUSE, HOUSE / "commands"))
)
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))
KITS = {module.__name__: module.__all__ for module in (plugsft, data_kit, kit)}


def _words(text):
    return text.split()


# From the ground up: a room imports lower rooms only.
ROOMS = _words("""
    base recipe tokens hooks registry data data_kit batches model ranks kit checkpoint output
    stages step_log run loop start
    export audit lab api commands testing __init__ cli __main__
""")
EXPORTED = {
    "plugsft": """
        AnswerLoss Batch Capability Data DataError DiskError Encoded Folder Ints Layouts
        LoadedStep Machine ModelLoad Place PluginError Ranks Recipe RecipeError
        Rendered Run RunModel Shard ShardWriter Slice TokenNll Train WeightSlice
        cache_folder child_environment damage digest hookimpl
        not_installed plugin progress reason_of say state write_text
    """,
    "plugsft.data_kit": "Tokenizer Tokens cut render_pairs share_prompts",
    "plugsft.kit": """
        artefact buffer decay_groups decoder_layers ensure_same_base find_modules fused_head
        lay_out make_labels meta_copy meta_model model_inputs num_weights optimizers_in shard_of
        target_places whole_shape
    """,
}
COMMANDS = _words("""
    data lab model recipes show train
""")
FILE_LINES, FUNCTION_LINES = 600, 80
# The most syntax nodes that each room may have, docstrings not counted. Lower a number when its
# room has shrunk. Raise one only by as much as you lower others in the same commit.
SIZES = {
    "commands": 13_701, "data": 19_674, "lab": 10_809, "ranks": 8_541, "model": 9_380,
    "start": 4_653, "export": 5_544, "checkpoint": 5_686, "audit": 6_618,
    "output": 6_756, "tokens": 4_638, "base": 5_400, "modules beside the rooms": 4_899,
    "api": 3_464, "recipe": 4_781, "registry": 4_023, "batches": 1_185, "testing": 2_174,
}  # fmt: skip
PLUGSFT_SIZE, PLUGINS_SIZE = 121_926, 45_984
# The two roads, which meet at a folder of tokens: all that a run's loop, and preparing, import.
ROADS = {"training road": 39_934, "data road": 32_562, "both roads": 58_965}


# Modules that import inside a function: a command imports what it runs when it is called, since
# torch takes seconds.
# A plugin's face imports its heavy siblings, and the kit, in its hooks: reading a recipe imports
# neither.
FACES = [path for path in PLUGINS if path.name == "__init__.py" or path.parent.name == "plugins"]
# The recipe's reader: most recipes are TOML, and need no parser of YAML.
FACES.append(HOUSE / "recipe/read.py")
# The face of the data's sources, and readers of rare sources, likewise: most recipes
# need none of these.
FACES += [HOUSE / "data/sources.py", *(HOUSE / "data/readers").glob("*.py")]
# The bases of plugins' faces.
FACES += [HOUSE / "model/answer_loss.py", ROOT / "plugins/bfd_packing/packer.py"]
LATE = [path for path in (HOUSE / "commands").glob("*.py") if path.stem in COMMANDS]
# Likewise the functions of `plugsft.api`, and a run's tables and model.
LATE += [HOUSE / f"{name}.py" for name in ("start/train", "start/checks")]
LATE += [HOUSE / f"api/{name}.py" for name in ("functions", "results")]


@cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf8"))


def name_of(path):
    """A module's name inside plugsft: "loop", "commands.train"."""
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts)


def imports_of(path):
    """The modules of plugsft that one of them imports when it runs."""
    found, typed = set(), set()
    package = list(path.relative_to(HOUSE).parent.parts)
    for node in ast.walk(parse(path)):
        # The hooks name the classes that plugins see, which stand above them.
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typed.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in typed:
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            # One dot is the folder of the module, two are the one above.
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                target = [*base, *(node.module.split(".") if node.module else [])]
                if (HOUSE.joinpath(*target) / f"{alias.name}.py").exists():
                    target.append(alias.name)
                found.add(".".join(target) or "__init__")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names]
            assert not any(name and name.split(".")[0] == "plugsft" for name in names), path
    return found


def size_of(path):
    """How many syntax nodes a file has: neither dense lines nor a formatter change this."""
    tree = parse(path)
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [node for node in texts if isinstance(node.value, ast.Constant)]
    docstrings = 2 * sum(isinstance(node.value.value, str) for node in texts)
    nodes = [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
    return len(nodes) - docstrings


def room_of(name):
    """The room of a module: a package, or a module beside the packages."""
    return name.partition(".")[0]


def test_every_entry_of_the_package_is_a_room():
    entries = {path.name for path in HOUSE.iterdir()} - {"__pycache__", "plugins"}
    assert {name.removesuffix(".py") for name in entries} <= {*ROOMS, "py.typed"}


def test_every_room_is_a_package_that_says_what_it_holds():
    rooms = {path.parent for path in MODULES}
    assert [room for room in rooms if not ast.get_docstring(parse(room / "__init__.py"))] == []


def test_a_module_imports_only_lower_rooms():
    faults = []
    for path in MODULES:
        own = room_of(name_of(path))
        rooms = {room_of(name) for name in imports_of(path)} - {own}
        higher = rooms - set(ROOMS[: ROOMS.index(own)])
        faults += [f"{name_of(path)} imports {room}" for room in sorted(higher)]
    assert faults == []


def test_there_is_no_circle():
    [*TopologicalSorter({name_of(path): imports_of(path) for path in MODULES}).static_order()]


def test_no_import_is_hidden():
    hidden = []
    for path in {*MODULES, *PLUGINS} - {*LATE}:
        functions = [
            node
            for node in ast.walk(parse(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for statement in [inner for node in functions for inner in ast.walk(node)]:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            own = isinstance(statement, ast.ImportFrom) and (
                statement.level == 1 or statement.module in ("plugsft.kit", "plugsft.data_kit")
            )
            if not (own and path in FACES):
                hidden.append(f"{path.relative_to(ROOT)}:{statement.lineno}")
    assert hidden == []


def test_plugins_import_public_names_only():
    faults = []
    for path in PLUGINS:
        for node in ast.walk(parse(path)):
            allowed = True
            if isinstance(node, ast.Import):
                allowed = not any(alias.name.split(".")[0] == "plugsft" for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level:
                # A plugin's own siblings; plugins do not know each other.
                allowed = node.level == 1 and path.parent.parent == ROOT / "plugins"
            elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "plugsft":
                allowed = {alias.name for alias in node.names} <= {*KITS.get(node.module, ())}
            if not allowed:
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert faults == []


def test_no_test_file_is_imported():
    """What several of them need stands in a helper beside them."""
    faults = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(parse(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.rpartition(".")[2].startswith("test_") for name in names):
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert faults == []


BUNDLED = {*find()}
# Where a plugin's name may stand: in the table of capabilities, and as another thing's name.
NAMED = {
    "plugsft/recipe/capabilities.py": {*SUGGESTED.values()},
    "plugsft/recipe/schedule_names.py": {"hf_schedule"},  # it writes lines of recipes
    "plugsft/kit/model.py": {"fused_loss"},  # a function
    "plugins/fused_loss/__init__.py": {"liger"},  # a package with a kernel
    "plugins/fused_loss/loss.py": {"liger"},
    "plugins/low_memory_adam/__init__.py": {"quantize"},  # an extra
    "plugsft/export/quantized.py": {"quantize"},
    "plugsft/data/render.py": {"reward"},  # a column
    "plugins/dpo/objective.py": {"reward"},  # a metric
    "plugins/kto/objective.py": {"reward"},
    # It writes recipes, which name plugins.
    **{path.relative_to(ROOT).as_posix(): BUNDLED for path in HOUSE.glob("commands/converting/*")},
}
ORDERED = {"after", "before", "requires", "conflicts"}


def plugins_named(path):
    """The plugins that a file names: not its own, in its docs or in the contract's lists."""
    tree, file = parse(path), path.relative_to(ROOT).as_posix()
    passed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg in ORDERED)
        for inner in (ast.walk(node) if isinstance(node, ast.keyword) else [node.value])
    }
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed
    ]
    named = {*texts, *(name for text in texts for name in re.findall(r"plugins\.(\w+)", text))}
    own = {path.stem, path.parent.name} if path in PLUGINS else set()
    return named & BUNDLED - own - NAMED.get(file, set())


def test_no_file_asks_for_a_plugin_by_its_name():
    """Ask the recipe for a capability, or Capability.bundled."""
    named = {path.relative_to(ROOT): plugins_named(path) for path in MODULES + PLUGINS}
    assert {path: names for path, names in named.items() if names} == {}


def test_files_and_functions_are_small():
    large = []
    for path in MODULES + PLUGINS:
        if (lines := len(path.read_text(encoding="utf8").splitlines())) > FILE_LINES:
            large.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    large.append(f"{path.relative_to(ROOT)}: {node.name}() has {length} lines")
    assert large == []


def road(start):
    """The modules that one imports, and theirs."""
    reached, left = set(), {start}
    while left:
        name = left.pop()
        if room_of(name) not in ("cli", "commands", "api"):
            reached.add(name)
            left |= imports_of(HOUSE / f"{name.replace('.', '/')}.py") - reached
    return {path for path in MODULES if name_of(path) in reached}


def test_no_room_grows():
    sizes = dict.fromkeys(SIZES, 0)
    for path in HOUSE.rglob("*.py"):
        room = path.relative_to(HOUSE).parts[0]
        if room != "plugins":
            sizes[room if room in sizes else "modules beside the rooms"] += size_of(path)
    sizes["plugsft"] = sum(sizes.values())
    sizes["plugins"] = sum(map(size_of, PLUGINS))
    roads = {"training road": road("loop"), "data road": road("data.prepare")}
    roads["both roads"] = roads["training road"] | roads["data road"]
    sizes |= {name: sum(map(size_of, paths)) for name, paths in roads.items()}
    print("\nsyntax nodes:", ", ".join(f"{name} {size}" for name, size in sizes.items()))
    limits = SIZES | ROADS | {"plugsft": PLUGSFT_SIZE, "plugins": PLUGINS_SIZE}
    grown = {name: size for name, size in sizes.items() if size > limits[name]}
    assert not grown, {name: f"{size} > {limits[name]}" for name, size in grown.items()}
    assert sum(SIZES.values()) <= PLUGSFT_SIZE, "a room grows only by as much as others shrink"


def test_training_knows_nothing_of_rows():
    assert [name_of(path) for path in road("loop") if room_of(name_of(path)) == "data"] == []


def functions_of(path):
    """The functions of a module, those of its classes among them."""
    return {node.name: node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)}


def test_the_loop_is_short():
    train = functions_of(HOUSE / "loop.py")["train"]
    lines = train.end_lineno - train.lineno + 1
    arguments = [argument.arg for argument in train.args.args]
    names = {
        node.id
        for node in ast.walk(train)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    print(f"\ntrain(): {lines} lines, {len({*arguments, *names})} locals")
    assert lines <= 40 and len({*arguments, *names}) <= 15


@pytest.mark.parametrize("name", ["loop", "run"])
def test_helpers_of_the_loop_take_few_arguments(name):
    for function in functions_of(HOUSE / f"{name}.py").values():
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        count = len([argument for argument in arguments if argument.arg != "self"])
        assert count <= 3, function.name


def test_exported_names_are_pinned():
    assert {name: " ".join(names) for name, names in KITS.items()} == {
        name: " ".join(text.split()) for name, text in EXPORTED.items()
    }
    for module in (plugsft, data_kit, kit):
        assert all(hasattr(module, name) for name in module.__all__)


def test_importing_plugsft_is_cheap():
    def seconds(statement):
        before = os.times()
        subprocess.run([sys.executable, "-c", statement], check=True)
        after = os.times()
        # The processor's time, not the clock's: other tests may run beside this one.
        return sum(after[2:4]) - sum(before[2:4])

    libraries = "import pluggy, psutil, pydantic.dataclasses, rich.progress"
    statements = ("pass", libraries, "import plugsft")
    times = [[seconds(statement) for statement in statements] for _ in range(7)]
    # The least of them: other work on the machine can only add to it.
    bare, theirs, full = map(min, zip(*times, strict=True))
    print(f"\nimport plugsft: {full - bare:.2f} s, {theirs - bare:.2f} s of them libraries")
    # A ratio: machines differ. Our own modules take 60 to 80 % of the libraries' time.
    assert full - theirs <= 1.2 * (theirs - bare)


def test_importing_plugsft_imports_nothing_heavy():
    heavy = {"torch", "numpy", "transformers", "datasets", "pyarrow", "accelerate", "trl"}
    script = "import plugsft, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert heavy & set(result.stdout.split()) == set()


def test_the_data_kit_imports_no_torch():
    script = "import plugsft.data_kit, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0 and "torch" not in result.stdout.split()


def test_every_hook_is_explained_and_tested():
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_floors.py"]
    text = "\n".join(path.read_text(encoding="utf8") for path in tests)
    called = {*re.findall(r"(?:def |hooks?\.|\"\s*)(\w+)\(", text)}
    assert [hook for hook in SPECS if hook not in called] == []
    for hook, spec in SPECS.items():
        assert spec.__doc__ and spec.__doc__.splitlines()[0].endswith("."), hook
        assert "return" in spec.__annotations__, hook


def test_every_public_name_has_a_docstring():
    silent = []
    for path in MODULES + PLUGINS:
        tree = parse(path)
        assert ast.get_docstring(tree) or not tree.body, path
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                if node.name.startswith("_"):
                    continue
                scopes = [node, *node.body]
            elif isinstance(node, ast.Module):
                scopes = node.body
            else:
                continue
            silent += [
                f"{path.name}: {scope.name}"
                for scope in scopes
                if isinstance(scope, ast.FunctionDef | ast.ClassDef)
                and not scope.name.startswith("_")
                and not ast.get_docstring(scope)
                and not any("overload" in ast.dump(mark) for mark in scope.decorator_list)
            ]
    assert silent == []
