"""Wrong programs made from right ones."""

import ast

COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Mult, ast.Div: ast.Mult}


def without_bodies(source: str) -> str:
    """Every function returns None."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Return(ast.Constant(None))]
    return ast.unparse(ast.fix_missing_locations(tree))


def with_other_returns(source: str) -> str:
    """Every value is returned in a tuple."""

    class Wrapped(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> ast.Return:
            return ast.Return(ast.Tuple([node.value or ast.Constant(None)], ast.Load()))

    return ast.unparse(ast.fix_missing_locations(Wrapped().visit(ast.parse(source))))


def with_another_operator(source: str) -> str | None:
    """The first comparison or sum is another one; None: there is none."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            node.op = OPERATORS[type(node.op)]()
        else:
            continue
        return ast.unparse(ast.fix_missing_locations(tree))
    return None
