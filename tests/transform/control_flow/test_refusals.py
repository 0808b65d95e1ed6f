"""Errors of scans."""

import pytreemod as pm
from tests.goldens import refusals


def scan_xs(xs, **options):
    return pm.filter_scan(lambda c, x: (c, x), None, xs, **options)


test_refusals = refusals(globals())
