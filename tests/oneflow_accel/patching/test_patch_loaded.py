"""Patches applied to modules that are imported already."""

from __future__ import annotations

import json

from oneflow_accel.patching.package import PatchedPackage, module_name
from oneflow_accel.patching.series import patch_root

import pytest

from tests.launch import run_process

# What a loaded module had, what a patch makes of it, an expression, and its value before and after.
CHANGES = {
    "a function": ("def f(): return 1", "def f(): return 2", "f()", 1, 2),
    "its default": ("def f(x=1): return x", "def f(x=2): return x", "f()", 1, 2),
    "its arguments": ("def f(x): return x", "def f(x, *, y=3): return x + y", "f(1)", 1, 4),
    "its text": ("def f():\n  'a'", "def f():\n  'b'", "f.__doc__", "a", "b"),
    "a function within": (
        "def f():\n  def g(): return 1\n  return g",
        "def f():\n  def g(): return 2\n  return g",
        "f()()",
        1,
        2,
    ),
    "a method": (
        "class C:\n  def f(self): return 1",
        "class C:\n  def f(self): return 2",
        "C().f()",
        1,
        2,
    ),
    "a static method": (
        "class C:\n  @staticmethod\n  def f(): return 1",
        "class C:\n  @staticmethod\n  def f(): return 2",
        "C.f()",
        1,
        2,
    ),
    "a class method": (
        "class C:\n  @classmethod\n  def f(cls): return [cls.__name__]",
        "class C:\n  @classmethod\n  def f(cls): return cls.__name__",
        "C.f()",
        ["C"],
        "C",
    ),
    "a property": (
        "class C:\n  @property\n  def f(self): return 1\n  @f.setter\n  def f(self, x): pass",
        "class C:\n  @property\n  def f(self): return 2\n  @f.setter\n  def f(self, x): pass",
        "C().f",
        1,
        2,
    ),
    "a class in a class": (
        "class C:\n  class D:\n    def f(self): return 1",
        "class C:\n  class D:\n    def f(self): return 2",
        "C.D().f()",
        1,
        2,
    ),
    "a decorated function": (
        "import functools\n@functools.lru_cache\ndef f(): return 1",
        "import functools\n@functools.lru_cache\ndef f(): return 2",
        "f()",
        1,
        1,  # as what was computed before stays
    ),
    "one that its decorator hides": (
        "def d(g):\n  return lambda: g()\n@d\ndef f(): return 1",
        "def d(g):\n  return lambda: g()\n@d\ndef f(): return 2",
        "f()",
        1,
        2,
    ),
    "a private name": (
        "class C:\n  __x = 5\n  def f(self): return 1",
        "class C:\n  __x = 5\n  def f(self): return self.__x",
        "C().f()",
        1,
        5,
    ),
    "super()": (
        "class B:\n  def f(self): return 1\nclass C(B):\n  def f(self): return super().f()",
        "class B:\n  def f(self): return 1\nclass C(B):\n  def f(self): return super().f() + 1",
        "C().f()",
        1,
        2,
    ),
    "super() where there was none": (
        "class B:\n  def f(self): return 1\nclass C(B):\n  def f(self): return 0",
        "class B:\n  def f(self): return 1\nclass C(B):\n  def f(self): return super().f() + 1",
        "C().f()",
        0,
        2,
    ),
    "a new import": (
        "def f(): return 1",
        "import math\ndef f(): return math.floor(2.5)",
        "f()",
        1,
        2,
    ),
    "an import that is gone": ("import os\ndef f(): return 1", "def f(): return 2", "f()", 1, 2),
    "a new function": ("def f(): return 1", "def g(): return 2\ndef f(): return g()", "f()", 1, 2),
    "a new class": ("def f(): return 1", "class D:\n  x = 2\ndef f(): return D.x", "f()", 1, 2),
    "new methods": (
        "class B:\n  def g(self): return 1\nclass C(B):\n  def f(self): return self.g()",
        "class B:\n  def g(self): return 1\nclass C(B):\n  def f(self): return self.g() + self.h\n"
        "  def g(self): return super().g() + 1\n  @property\n  def h(self): return 3",
        "C().f()",
        1,
        5,
    ),
    "a new name": ("def f(): return 1", "N = 2\ndef f(): return N", "f()", 1, 2),
    "another value": ("N = 1\ndef f(): return N", "N = 2\ndef f(): return N", "f()", 1, 2),
    "another value in a class": ("class C:\n  N = 1", "class C:\n  N = 2", "C.N", 1, 2),
    "the text of a class": ("class C:\n  'a'", "class C:\n  'b'", "C.__doc__", "a", "b"),
    "annotations that are text": (
        "from __future__ import annotations\ndef f(x: int): return 1",
        "from __future__ import annotations\ndef f(x: Any): return 2",
        "f(0)",
        1,
        2,
    ),
}
REFUSED = {
    "a base class": ("class C: pass", "class C(dict): pass", "C gets other bases"),
    "a decorator": (
        "def f(): return 1",
        "import functools\n@functools.lru_cache\ndef f(): return 1",
        "f gets other decorators",
    ),
    "a new statement": ("x = []", "x = []\nx.append(1)", "`x.append(1)`"),
    "a statement that is gone": ("x = []\nx.append(1)", "x = []", "`x.append(1)`"),
    "an import that fails": ("x = 1", "x = 1\nimport no_such_module", "`import no_such_module`"),
    "a definition that fails": ("x = 1", "x = 1\ny = 1 / 0", "ZeroDivisionError"),
    "a function that is another": ("def f(): pass\nf = len", "def f(): return 1\nf = len", "f()"),
}


def patched(fake, before: str, after: str, **more: str) -> None:
    """A patch that makes `after` of `before`, and a second one on the file `other`."""
    text = before + "\n"
    fake.numbers.write_text(text)
    fake.add_patch(edits={"numbers": (text, after + "\n")}, before={"numbers": text}, **more)
    fake.add_patch("0002-other.patch", edits={"other": ("return 2", "return 20")})


def states(session) -> dict[str, str]:
    return {status.name: status.state for status in session.status()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_loaded_module_gets(fake, change: str) -> None:
    before, after, expression, was, is_now = CHANGES[change]
    patched(fake, before, after)
    module = fake.load()
    # As other modules hold it.
    held = {name: value for name, value in vars(module).items() if name in "fC"}
    assert eval(expression, dict(held)) == was
    session = fake.install()
    assert session.apply_to_imported() == []
    assert eval(expression, dict(held)) == is_now
    assert eval(expression, vars(module)) == is_now
    assert states(session)["0001-change.patch"] == "applied"
    assert session.apply_to_imported() == []


@pytest.mark.parametrize("change", REFUSED)
def test_what_has_happened_is_named_and_the_other_patches_apply(fake, change: str) -> None:
    before, after, named = REFUSED[change]
    patched(fake, before, after)
    module, other = fake.load(), fake.load("other")
    was = dict(vars(module))
    session = fake.install()
    (late,) = session.apply_to_imported()
    assert f"{fake.name}-1.0/0001-change.patch is left out" in late
    assert named in late
    assert other.two() == 20
    assert {name: vars(module)[name] for name in was} == was
    assert states(session) == {"0001-change.patch": "refused", "0002-other.patch": "applied"}


def test_a_value_that_another_module_has_imported_is_named(fake) -> None:
    patched(fake, "N = [1]", "N = [2]")
    module = fake.load()
    other = fake.load("other")
    other.N = module.N
    (late,) = fake.install().apply_to_imported()
    assert f"{fake.name}.other has imported N" in late
    assert module.N == [1]


def test_a_patch_applies_to_all_of_its_files_or_to_none(fake) -> None:
    """Also to those that are not imported yet, and to what later patches make of them."""
    text = "class C: pass\n"
    fake.numbers.write_text(text)
    other = fake.other.read_text()
    edits = {"numbers": ("class C", "class C(dict)"), "other": ("return 1", "return 10")}
    fake.add_patch(edits=edits, before={"numbers": text})
    changed = other.replace("return 1", "return 10")
    fake.add_patch(
        "0002-other.patch", edits={"other": ("return 2", "return 20")}, before={"other": changed}
    )
    fake.load()
    session = fake.install()
    assert len(session.apply_to_imported()) == 2
    module = fake.load("other")
    assert (module.one(), module.two()) == (1, 2)
    assert set(states(session).values()) == {"refused"}


def test_one_module_imports_what_another_one_gets(fake) -> None:
    text = fake.numbers.read_text()
    edits = {
        "numbers": ("def one", f"from {fake.name}.other import three\n\n\ndef one"),
        "other": ("def one", "def three():\n    return 3\n\n\ndef one"),
    }
    fake.add_patch(edits=edits)
    fake.add_patch(
        "0002-use.patch",
        edits={"numbers": ("return 1", "return three()")},
        before={"numbers": text.replace(*edits["numbers"])},
    )
    module, _ = fake.load(), fake.load("other")
    assert fake.install().apply_to_imported() == []
    assert module.one() == 3


def test_what_was_made_before_is_counted(fake) -> None:
    body = "  def __init__(self): self.x = {}\n  def f(self): return {}"
    wrap = "def wrap():\n  def inner(): return {}\n  def same(): return 0\n  return inner, same"
    text = "class C:\n" + body + "\n" + wrap
    patched(fake, text.format(1, 1, 1), text.format(2, 2, 2))
    module = fake.load()

    class Derived(module.C):
        pass

    made = [module.C(), module.C(), Derived(), module.wrap()]
    (late,) = fake.install().apply_to_imported()
    assert late.startswith(f"what is made already stays as {fake.name} made it (")
    assert set(late.partition("(")[2].rstrip(")").split(", ")) == {"2 C", "1 Derived", "1 wrap"}
    # A method that is no constructor works on what is there.
    assert (made[0].x, made[0].f(), made[3][0]()) == (1, 2, 1)
    assert (module.C().x, module.wrap()[0]()) == (2, 2)


DUMP = """
import importlib, json, marshal, sys, types
first, modules = sys.argv[1] == "first", sys.argv[2:]
if first:
    import oneflow_accel
for module in modules:
    importlib.import_module(module)
import oneflow_accel

def dump(owner, module):
    found = {}
    for name, value in vars(owner).items():
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        inner = getattr(inner, "__wrapped__", inner)
        if isinstance(value, type) and value.__module__ == module:
            found[name] = dump(value, module)
        elif isinstance(inner, types.FunctionType) and inner.__module__ == module:
            # Without references between constants, which depend on what else holds them.
            code = marshal.dumps(inner.__code__, 2).hex()
            found[name] = [type(value).__name__, code, repr(inner.__kwdefaults__), inner.__doc__,
                           str(inner.__annotations__), len(inner.__defaults__ or ())]
    return found

print("dump " + json.dumps({name: dump(sys.modules[name], name) for name in modules}))
"""


def test_the_packages_are_the_same_whether_imported_before_or_after() -> None:
    """All functions of all patched modules, to the last instruction."""
    modules = []
    for name in ("oneflow", "libai"):
        package = PatchedPackage.load(patch_root(), name)
        if package is None:
            pytest.skip(f"{name} is not installed")
        modules += list(map(module_name, package.modules.values()))

    def functions(order: str) -> dict:
        process = run_process(["-W", "ignore", "-c", DUMP, order, *modules])
        assert process.returncode == 0, process.stdout
        line = next(line for line in process.stdout.splitlines() if line.startswith("dump "))
        return json.loads(line.removeprefix("dump "))

    before, after = functions("first"), functions("last")
    assert set(before) == set(modules)
    different = [name for name in modules if before[name] != after[name]]
    assert not different
