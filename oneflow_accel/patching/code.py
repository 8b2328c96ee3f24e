"""Compiles patched source, and patches a module that is imported already.

Tracebacks stay true to the file on disk: the code keeps the name of the file, and a line that the
file has keeps its number. A line that a patch added is numbered past the end of the file, and
`linecache` is told its text. Editors, debuggers and Python's own top-level traceback (which reads
the file on disk) thus never show a wrong line, and `traceback` shows patched lines too.

Other modules hold references to the functions of a module that is imported already, so that a
function stays the object it is and gets the patched `__code__`. What the patched module has in
addition is run in the module's namespace first. Whatever else a patch changes (base classes,
decorators, statements that have run) cannot be made up for: `Refusal` names it.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import linecache
import marshal
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import MAGIC_NUMBER
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.package import PatchedSource, write_atomically
from oneflow_accel.patching.series import SourceLine, join


def parse(lines: Sequence[SourceLine], *, label: str, path: str) -> ast.Module:
    """The syntax tree of patched source, numbered as patched; label and path name patch and file in
    errors. PatchError if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            # What Python thinks of the package's escapes was said when it was installed.
            warnings.simplefilter("ignore", DeprecationWarning)
            return ast.parse(join(lines), path)
    except SyntaxError as error:
        raise PatchError(
            f"patch {label}: {path} is not valid Python after it: {error.msg}, "
            f"{(error.text or '').strip()!r}"
        ) from error


def compiled(source: PatchedSource, filename: str, kept: Path) -> CodeType:
    """The code of patched source, numbered as the text at the top says.

    To compile OneFlow's files takes 0.1 to 0.2 s of each program's start, so the code stays in the
    file `kept`, as Python keeps that of sources, until patch, original or Python are others.
    """
    lines = (f"{number} {text}" for text, number in source.patched)
    key = (MAGIC_NUMBER, filename, source.label, len(source.original), "".join(lines))
    digest = hashlib.sha256(repr(key).encode()).digest()
    _tell_linecache(source, filename)
    with suppress(OSError, EOFError, ValueError, TypeError):
        content = kept.read_bytes()
        if content.startswith(digest):
            return marshal.loads(content[len(digest) :])
    code: CodeType = compile(parse_numbered(source, filename), filename, "exec", dont_inherit=True)
    if not sys.dont_write_bytecode:
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, digest + marshal.dumps(code))
    return code


def parse_numbered(source: PatchedSource, filename: str) -> ast.Module:
    """The syntax tree of patched source, numbered as the text at the top says."""
    tree = parse(source.patched, label=source.label, path=filename)
    next_number = count(len(source.original) + 2)
    numbers = [line.number or next(next_number) for line in source.patched]
    for node in ast.walk(tree):
        for attribute in ("lineno", "end_lineno"):
            number = getattr(node, attribute, None)
            if number is not None:
                setattr(node, attribute, numbers[number - 1])
    _tell_linecache(source, filename)
    return tree


def _tell_linecache(source: PatchedSource, filename: str) -> None:
    # A statement at column 0, so that `inspect` does not take what follows for the rest of the last
    # function of the file.
    separator = f'"added by {source.label}:"\n'
    added = [separator, *(line.text for line in source.patched if line.number is None)]
    texts = [line.text for line in source.original] + added
    # No modification time: linecache then keeps the entry whatever the file on disk is.
    linecache.cache[filename] = (sum(map(len, texts)), None, texts, filename)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
# What an object has of them it has for good.
_CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "__setstate__"}


class Refusal(Exception):  # noqa: N818 - no error: the other patches go on.
    """A change that cannot be made to a loaded module; the text says which."""


@dataclass
class _Scope:
    """A module or a class (`owner`), and what changes in it: statements to run (imports,
    definitions, new names), loaded functions with the definitions to replace their code, and
    classes inside it."""

    owner: ModuleType | type
    added: list[ast.stmt] = field(default_factory=list)
    changed: list[tuple[FunctionType, ast.FunctionDef | ast.AsyncFunctionDef]] = field(
        default_factory=list
    )
    inner: list[_Scope] = field(default_factory=list)
    doc: str | None = None


class LoadedModule:
    """A module that is imported already, and its patches; Refusal if one changes something that has
    happened already.

    Call `add` until it returns True, then `prepare`, then `apply`; the first two change nothing
    that runs, so that they can be called for all modules before any gets its patches.
    """

    def __init__(self, module: ModuleType, source: PatchedSource) -> None:
        self.module = module
        self.source = source
        self._file = str(module.__file__)
        before = ast.parse(join(source.original))
        after = parse_numbered(source, self._file)
        imports = [node for node in after.body if isinstance(node, ast.ImportFrom)]
        self._future = [node for node in imports if node.module == "__future__"]
        self._scope = self._compare(module, before.body, after.body)
        self._waiting = list(self._scope.added)
        # Loaded functions, what they become, and their class, None outside of one.
        self._new: list[tuple[FunctionType, FunctionType, type | None]] = []
        self._set: list[tuple[ModuleType | type, str, Any]] = []

    def add(self) -> bool:
        """Run what the patches add to the module, unless it raises (Refusal). Returns False where
        an import did not find what it wants: another module may be about to get it."""
        while self._waiting:
            statement = self._waiting[0]
            try:
                if isinstance(statement, _ASSIGNMENTS):
                    # A name that has a value keeps it until `apply`.
                    self._set += self._assigned(statement)
                else:
                    self._run([statement], self.module.__dict__)
            except ImportError:
                return False
            except Exception as error:
                raise Refusal(f"{_line(statement)}: {type(error).__name__}: {error}") from error
            del self._waiting[0]
        return True

    def prepare(self) -> None:
        """Make the patched functions; Refusal if one cannot take the place of the loaded one."""
        if self._waiting:
            raise Refusal(f"{_line(self._waiting[0])} finds nothing")
        namespace: dict[str, Any] = {}
        try:
            self._run(_definitions(self._scope), self.module.__dict__, namespace)
        except Exception as error:
            raise Refusal(f"{type(error).__name__}: {error}") from error
        self._match(self._scope, namespace)

    def apply(self) -> list[CodeType | type]:
        """Give the functions their patched code, and return what has made what remains as it was:
        codes of functions inside of them, and classes whose constructors were patched."""
        old: list[CodeType | type] = []
        for function, patched, cls in self._new:
            if cls is not None and function.__name__ in _CONSTRUCTORS:
                old.append(cls)
            kept = set(_inner_codes(patched.__code__))
            old += [code for code in _inner_codes(function.__code__) if code not in kept]
            # The text that its file gave it.
            has_own_doc = function.__doc__ == function.__code__.co_consts[0]
            function.__code__ = patched.__code__
            function.__defaults__ = patched.__defaults__
            function.__kwdefaults__ = patched.__kwdefaults__
            function.__annotations__ = patched.__annotations__
            # Where it was not given another one, as oneflow does.
            if has_own_doc:
                function.__doc__ = patched.__doc__
        for owner, name, value in self._set:
            setattr(owner, name, value)
        return old

    def _compare(
        self, owner: ModuleType | type, before: Sequence[ast.stmt], after: Sequence[ast.stmt]
    ) -> _Scope:
        scope = _Scope(owner)
        was, is_now = _by_name(before), _by_name(after)
        for name, node in was.items():
            if name not in is_now and not isinstance(
                node, (*_DEFINITIONS, *_IMPORTS, *_ASSIGNMENTS)
            ):
                _refuse_unless_doc(node, before)
        for name, node in is_now.items():
            loaded = was.get(name)
            if loaded is None:
                if isinstance(node, (*_DEFINITIONS, *_IMPORTS)) or _new_names(node):
                    scope.added.append(node)
                else:
                    _refuse_unless_doc(node, after)
                    scope.doc = ast.get_docstring(ast.Module(list(after), []), clean=False)
            elif ast.dump(loaded) != ast.dump(node):
                self._compare_definitions(scope, loaded, node)
        return scope

    def _compare_definitions(self, scope: _Scope, loaded: ast.stmt, node: ast.stmt) -> None:
        assert isinstance(loaded, _DEFINITIONS)
        if type(loaded) is not type(node) or _dump(loaded.decorator_list) != _dump(
            node.decorator_list
        ):
            raise Refusal(f"{loaded.name} gets other decorators")
        value = vars(scope.owner).get(loaded.name)
        if isinstance(node, ast.ClassDef):
            assert isinstance(loaded, ast.ClassDef)
            if _dump([*loaded.bases, *loaded.keywords]) != _dump([*node.bases, *node.keywords]):
                raise Refusal(f"the class {loaded.name} gets other bases")
            if not isinstance(value, type) or value.__module__ != self.module.__name__:
                raise Refusal(f"something else has taken the place of the class {loaded.name}")
            scope.inner.append(self._compare(value, loaded.body, node.body))
            return
        first = loaded.decorator_list[0].lineno if loaded.decorator_list else loaded.lineno
        for function in _functions_of(value):
            code = function.__code__
            if (code.co_name, code.co_firstlineno) == (loaded.name, first) and (
                function.__globals__ is self.module.__dict__
            ):
                scope.changed.append((function, node))
                return
        raise Refusal(f"something else has taken the place of {loaded.name}()")

    def _assigned(self, statement: ast.stmt) -> list[tuple[ModuleType | type, str, Any]]:
        """The new values of names, run beside the module; names without a value get it at once."""
        values: dict[str, Any] = {}
        self._run([statement], self.module.__dict__, values)
        values.pop("__annotations__", None)
        late: list[tuple[ModuleType | type, str, Any]] = []
        for name, value in values.items():
            if name not in vars(self.module):
                setattr(self.module, name, value)
            else:
                self._refuse_held(name)
                late.append((self.module, name, value))
        return late

    def _refuse_held(self, name: str) -> None:
        value = vars(self.module)[name]
        for other in list(sys.modules.values()):
            if other is not self.module and getattr(other, "__dict__", {}).get(name) is value:
                raise Refusal(f"{other.__name__} has imported {name}, which gets another value")

    def _match(self, scope: _Scope, namespace: dict[str, Any]) -> None:
        owner = scope.owner if isinstance(scope.owner, type) else None
        if owner is not None:
            for function in [f for value in namespace.values() for f in _functions_of(value)]:
                # What super() without arguments reads.
                free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                for name, cell in free:
                    if name == "__class__":
                        cell.cell_contents = owner
        for loaded, node in scope.changed:
            patched = namespace[node.name]
            if loaded.__code__.co_freevars == patched.__code__.co_freevars:
                self._new.append((loaded, patched, owner))
            elif vars(scope.owner)[node.name] is loaded:
                # It calls super(), and did not before: a cell cannot be added to a function.
                self._set.append((scope.owner, node.name, patched))
            else:
                raise Refusal(f"{node.name}() is decorated and calls super() only when patched")
        if owner is not None:
            names = [name for node in scope.added for name in _names(node)]
            self._set += [(owner, name, namespace[name]) for name in names]
        if scope.doc is not None:
            self._set.append((scope.owner, "__doc__", scope.doc))
        for inner in scope.inner:
            self._match(inner, vars(namespace[inner.owner.__name__]).copy())

    def _run(
        self,
        statements: Sequence[ast.stmt],
        variables: dict[str, Any],
        local: dict[str, Any] | None = None,
    ) -> None:
        tree = ast.fix_missing_locations(ast.Module([*self._future, *statements], []))
        code = compile(tree, self._file, "exec", dont_inherit=True)
        exec(code, variables, variables if local is None else local)


def made_before(makers: Iterable[CodeType | type]) -> dict[str, int]:
    """How many objects there are of these classes, and functions of these codes, by the name of the
    class or of the function around."""
    codes = {id(maker) for maker in makers if isinstance(maker, CodeType)}
    classes = {maker for maker in makers if isinstance(maker, type)}
    counts: Counter[str] = Counter()
    for thing in gc.get_objects() if codes or classes else ():
        # By type(), not isinstance(): what stands for another object may then run its code.
        kind = type(thing)
        if kind is FunctionType and id(thing.__code__) in codes:
            counts[thing.__qualname__.partition(".")[0]] += 1
        elif not classes.isdisjoint(kind.__mro__):
            counts[kind.__name__] += 1
    return dict(counts)


def _by_name(body: Iterable[ast.stmt]) -> dict[str, ast.stmt]:
    """Statements by what they define, else by what they say; of equals the one that counts."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        key = node.name if isinstance(node, _DEFINITIONS) else ast.dump(node)
        if isinstance(node, _FUNCTIONS) and key in found:
            # The getter and the setter of a property, for example: told apart by decorators.
            key += _dump(node.decorator_list)
        found[key] = node
    return found


def _definitions(scope: _Scope) -> list[ast.stmt]:
    """The changed and, in a class, the added definitions, as statements that change nothing."""
    body: list[ast.stmt] = []
    for _, node in scope.changed:
        # Decorators have done their work; a function begins in the line of its first one, though.
        nothing = [
            ast.copy_location(ast.parse("lambda f: f", mode="eval").body, decorator)
            for decorator in node.decorator_list
        ]
        plain = type(node)(**{**dict(ast.iter_fields(node)), "decorator_list": nothing})
        body.append(ast.copy_location(plain, node))
    for inner in scope.inner:
        statements = [*_definitions(inner), *inner.added]
        name = inner.owner.__name__
        body.append(ast.ClassDef(name, [], [], statements or [ast.Pass()], []))
    return body


def _functions_of(value: object) -> Iterator[FunctionType]:
    """The functions in a method, a property or what decorators have made of a function."""
    seen: set[int] = set()
    waiting = [value]
    # An end, as some objects make up a new attribute whenever they are asked.
    while waiting and len(seen) < 100:
        value = waiting.pop(0)
        if id(value) in seen or isinstance(value, (type, ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield value
            for cell in value.__closure__ or ():
                try:
                    waiting.append(cell.cell_contents)
                except ValueError:  # not set yet
                    continue
        for name in ("__wrapped__", "__func__", "fget", "fset"):
            inner = getattr(value, name, None)
            if callable(inner):
                waiting.append(inner)


def _inner_codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner_codes(constant)


def _names(node: ast.stmt) -> list[str]:
    """What a statement gives a value."""
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, _IMPORTS):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return _new_names(node)


def _new_names(node: ast.stmt) -> list[str]:
    """The names that an assignment to nothing but names gives a value, else []."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if len(names) == len(targets) else []


def _refuse_unless_doc(node: ast.stmt, body: Sequence[ast.stmt]) -> None:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not (is_text and body[0] is node):
        raise Refusal(_line(node))


def _line(node: ast.stmt) -> str:
    return f"`{ast.unparse(node).splitlines()[0]}`"


def _dump(nodes: Iterable[ast.AST]) -> str:
    return " ".join(map(ast.dump, nodes))
