"""The rules of the code that a reader relies on: which room may import which, and how large anything may grow.

They are read from the source with `ast`; nothing is imported. Function length, complexity and parameters are ruff's.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "longstraw"

# A room may import the rooms of lower floors and its own files. Within a floor of the design: a state hands its extents
# to operators, and training measures memory with the tracker of evidence.
FLOORS = (
    ("errors",),
    ("records", "config"),
    ("ops", "report", "config_file"),
    ("state",),
    ("models", "parallel", "grpo"),
    ("execution",),
    ("evidence",),
    ("training", "planning"),
    ("cli", "__init__"),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

MAX_FILE_LINES = 400
MAX_PROBES_PER_THOUSAND_LINES = 1
MAX_GLOSSARY_WORDS = 30
TORCH_FREE = ("config", "config_file", "errors", "report")
HUGGING_FACE_MODEL_LIBRARIES = {"transformers", "peft", "tokenizers", "accelerate", "bitsandbytes", "gguf"}


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """The file or folder right below the package that a module lies in; `__init__` for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {module_name(path): path for path in TREES}


def imported_names(tree, module, is_package):
    """Absolute dotted names a module imports anywhere, inside functions and type-checking blocks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)


IMPORTS = {
    module: set(imported_names(TREES[path], module, path.name == "__init__.py")) for module, path in MODULES.items()
}


def own_module(name):
    """The module of this package that a dotted name lies in (`longstraw.records.Prompt`: `longstraw.records`)."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in MODULES else None


def defined_in_public(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def test_every_room_has_a_floor():
    assert {room(module) for module in MODULES} <= FLOOR.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module):
    for name in IMPORTS[module]:
        target = own_module(name)
        if target is None or room(target) == room(module):
            continue
        assert FLOOR[room(target)] < FLOOR[room(module)], f"{module} imports {target}, which is not below it"


def test_hugging_face_models_are_touched_in_one_room():
    for module, names in IMPORTS.items():
        touched = {name.partition(".")[0] for name in names} & HUGGING_FACE_MODEL_LIBRARIES
        assert not touched or room(module) == "models", f"{module} imports {sorted(touched)}; only models/ may"


@pytest.mark.parametrize("start", TORCH_FREE)
def test_configuration_and_errors_need_no_torch(start):
    pending, seen = [f"longstraw.{start}"], set()
    while pending:
        module = pending.pop()
        if module in seen or module not in IMPORTS:
            continue
        seen.add(module)
        names = IMPORTS[module]
        assert not any(name.partition(".")[0] == "torch" for name in names), f"{start} reaches torch through {module}"
        pending += filter(None, map(own_module, names))


def test_nothing_but_the_command_line_reads_environment_switches():
    for module, path in MODULES.items():
        read = [
            node.lineno
            for node in ast.walk(TREES[path])
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
        ]
        assert not read or room(module) in {"cli", "__main__"}, f"{module} line {read} reads the environment"


@pytest.mark.parametrize("folder", ["src", "tests", "examples", "benchmarks"])
def test_files_stay_readable_in_length(folder):
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_attributes_are_known_not_probed():
    probes = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}
    ]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in TREES)
    assert len(probes) * 1000 < MAX_PROBES_PER_THOUSAND_LINES * num_lines or not probes, probes


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module):
    tree = TREES[MODULES[module]]
    assert ast.get_docstring(tree) or not tree.body, f"{module} has no docstring"
    missing = [node.name for node in defined_in_public(tree) if not ast.get_docstring(node)]
    assert missing == [], f"{module}: no docstring on {missing}"


def test_no_untyped_dict_crosses_a_border():
    for module, path in MODULES.items():
        for node in defined_in_public(TREES[path]):
            for function in ast.walk(node):
                if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
                    continue
                arguments = function.args
                everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                annotations = [argument.annotation for argument in everything] + [function.returns]
                texts = [ast.unparse(annotation) for annotation in annotations if annotation]
                assert not any("dict[str, Any]" in text for text in texts), f"{module}.{function.name}: make a record"


def test_glossary_stays_short():
    rows = [line for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    words = rows[1:]  # below the heading
    assert 0 < len(words) <= MAX_GLOSSARY_WORDS
