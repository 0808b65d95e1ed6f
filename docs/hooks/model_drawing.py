"""A model in two pictures: as a tree, and in a transform."""

from __future__ import annotations

from svg import element, figure, line, picture, tip, words

WIDTH, HEIGHT = 380.0, 262.0


def draw_model() -> str:
    """The tree on the left, a transform on the right."""
    caption = (
        "<b>A model is a tree.</b> Its leaves are arrays; everything else is its structure."
        " <b>A transform passes the arrays through a compiled program</b>, which the structure"
        " selects, and returns a new model."
    )
    return figure(caption, _tree(), _transform())


def _tree() -> str:
    """The fields of a small perceptron."""
    root, first, second, static = (190.0, 30.0), (82.0, 116.0), (232.0, 116.0), (338.0, 116.0)
    leaves = [
        (44.0, first, "weight", "f32[8,3]"),
        (120.0, first, "bias", "f32[8]"),
        (194.0, second, "weight", "f32[2,8]"),
        (270.0, second, "bias", "f32[2]"),
    ]
    branches = [_branch(*root, *end) for end in (first, second, static)]
    twigs = [_branch(*layer, x, 186.0) for x, layer, _, _ in leaves]
    return picture(
        WIDTH,
        HEIGHT,
        "An MLP as a tree: two Linear layers with a weight and a bias each are its data, "
        "the function relu is configuration",
        *branches,
        *twigs,
        _node(*root, "MLP", 58),
        words(104, 78, "layers[0]", "pm-small", "end"),
        words(203, 88, "layers[1]", "pm-small", "end"),
        words(282, 66, "activation", "pm-small", "start"),
        _node(*first, "Linear", 70),
        _node(*second, "Linear", 70),
        _static(*static, "relu", 58),
        *(_leaf(x, 200.0) for x, _, _, _ in leaves),
        *(words(x, 238, name, "pm-code") for x, _, name, _ in leaves),
        *(words(x, 254, shape, "pm-small pm-code") for x, _, _, shape in leaves),
        words(338, 154, "configuration", "pm-small"),
    )


def _transform() -> str:
    """A model goes in; arrays and configuration separate, and rejoin in a new model."""
    return picture(
        WIDTH,
        HEIGHT,
        "A transform: arrays go from the model through the compiled program to a new model, "
        "configuration goes around it",
        _small_tree(52, 96),
        _small_tree(328, 96),
        words(52, 156, "model"),
        words(328, 156, "new model"),
        line("M86 84H122", "pm-data pm-thick"),
        tip(128, 84, 0, "pm-data"),
        line("M252 84H286", "pm-data pm-thick"),
        tip(292, 84, 0, "pm-data"),
        element("rect", x=132, y=40, width=116, height=88, rx=12, class_="pm-box"),
        words(190, 64, "jit"),
        words(190, 89, "grad · vmap"),
        words(190, 114, "scan · cond"),
        words(107, 72, "arrays", "pm-small"),
        words(270, 72, "arrays", "pm-small"),
        line("M52 168V186Q52 204 70 204H310Q328 204 328 186V174", "pm-config pm-thick"),
        tip(328, 166, -90, "pm-config"),
        words(190, 196, "configuration", "pm-small"),
        words(190, 225, "selects the program", "pm-small"),
    )


def _branch(x: float, y: float, to_x: float, to_y: float) -> str:
    """A curve from a node down to its child."""
    middle = (y + to_y) / 2
    return line(f"M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y}", "pm-edge")


def _node(x: float, y: float, name: str, width: float) -> str:
    """A Module."""
    box = {"x": x - width / 2, "y": y - 15, "width": width, "height": 30.0}
    return element("rect", **box, rx=15, class_="pm-box") + words(x, y + 5, name, "pm-code")


def _static(x: float, y: float, name: str, width: float) -> str:
    """Configuration."""
    box = {"x": x - width / 2, "y": y - 15, "width": width, "height": 30.0}
    return element("rect", **box, rx=4, class_="pm-static") + words(x, y + 5, name, "pm-code")


def _leaf(x: float, y: float, size: float = 1.0) -> str:
    """An array, with its tip down."""
    shape = "M0 -17C13 -12 13 8 0 17C-13 8 -13 -12 0 -17Z"
    return element("path", d=shape, class_="pm-leaf", transform=f"translate({x} {y}) scale({size})")


def _small_tree(x: float, y: float) -> str:
    """A small model: three array leaves, and one field of configuration."""
    ends = [(x - 27, y + 22), (x - 9, y + 22), (x + 9, y + 22)]
    return "".join(
        [
            *(line(f"M{x} {y - 34}L{end_x} {end_y}", "pm-edge") for end_x, end_y in ends),
            line(f"M{x} {y - 34}L{x + 27} {y + 22}", "pm-edge"),
            element("circle", cx=x, cy=y - 36, r=8, class_="pm-box"),
            *(_leaf(end_x, end_y + 4, 0.68) for end_x, end_y in ends),
            element("rect", x=x + 19, y=y + 17, width=16, height=16, rx=3, class_="pm-static"),
        ]
    )
