"""Types in the Python reference as users write them: without the limits of `Annotated`, and without private aliases."""

from typing import Any

from griffe import Attribute, Expr, ExprBinOp, ExprName, ExprSubscript, ExprTuple, Extension


class PlainTypes(Extension):
    """Extension of griffe, which reads the docstrings."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Replace the type of an attribute, from which griffe also makes the parameter of a dataclass."""
        attr.annotation = _plain(attr.annotation, attr)


def _plain(annotation: Any, attr: Attribute) -> Any:
    if isinstance(annotation, ExprSubscript) and str(annotation.left) == "Annotated":
        listed = annotation.slice
        return _plain(listed.elements[0] if isinstance(listed, ExprTuple) else listed, attr)
    if isinstance(annotation, ExprSubscript):
        annotation.slice = _plain(annotation.slice, attr)
    if isinstance(annotation, ExprTuple):
        annotation.elements = [_plain(element, attr) for element in annotation.elements]
    if isinstance(annotation, ExprBinOp):
        annotation.left, annotation.right = _plain(annotation.left, attr), _plain(annotation.right, attr)
    if isinstance(annotation, ExprName) and annotation.name.startswith("_"):
        alias = attr.module.members.get(annotation.name)
        if isinstance(alias, Attribute) and isinstance(alias.value, Expr):
            return _plain(alias.value, attr)
    return annotation
