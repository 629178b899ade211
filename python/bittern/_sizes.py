"""The sizes of a problem, from the axes of the arrays given: operands name their axes.

An axis that is named after a field is that field ("tokens"). One that is named by two fields, or by
a field and a number, tells the field that is not known yet ("sequences*kv_heads", "sequences+1",
"capacity/page_size"). Other names ("words", "2^bits") tell no field.

An array may have more axes than its operand: the first ones are then merged into the operand's
first. An array of one axis, for an operand of two, is one row.
"""

import functools
import math
import re

# Which axes are asked first: offsets count sequences whatever else does, and an axis that is a
# field leaves nothing to solve for.
ORDER = ("+", "", "-", "*", "/")
QUANTISED = ("outer_size", "axis_size")


@functools.cache
def parse(name):
    """(left, operator, right) of an axis' name; None where it is no such expression."""
    match = re.fullmatch(r"([a-z_]\w*)(?:([-+*/])(\w+))?", name)
    return match and (match[1], match[2] or "", match[3])


class Axes:
    """An array's axes, as its operand has them."""

    def __init__(self, operand, shape, axis=None):
        self.operand, self.shape, self.names = operand.name, shape, operand.axes
        count = len(self.names)
        one_row = count == 2 and len(shape) == 1 and self.names[1] != "1"
        first = len(shape) - count + 1  # of the axes that are not merged
        self.enough = first > 0 or one_row
        self.is_full = axis is not None and self.names[:2] == QUANTISED
        if self.is_full:  # `axis` is the quantised one, and those after it are one to the op
            first = axis
            self.names = (*QUANTISED, "inner_size")
        self.lead, self.rest = shape[:first], shape[first:]
        self.lengths = (math.prod(self.lead), *self.rest)
        if self.is_full:
            self.lengths = (*self.lengths[:2], math.prod(self.rest[1:]))


class Sizes:
    """Each field's value and the array that it is from, and how outputs lie."""

    def __init__(self, names, defaults, known, arrays):
        self.names = names  # of the fields that are sizes
        self.defaults, self.known = defaults, known  # of all integers; those given
        self.arrays = arrays
        self.found, self.source, self.merged = {}, {}, {}
        self.full = next((a for a in arrays if a.is_full), None)
        axes = [(a, i, parse(name)) for a in arrays if a.enough for i, name in enumerate(a.names)]
        for operator in ORDER:
            for array, i, term in axes:
                if term and term[1] == operator:
                    self.solve(array, i, *term)

    def value(self, field):
        if field.isdigit():
            return int(field)
        return self.known.get(field, self.found.get(field, self.defaults.get(field)))

    def is_free(self, field):
        return field in self.names and field not in self.known and field not in self.found

    def solve(self, array, i, left, operator, right):
        field, other = left, self.value(right) if right else None
        if operator == "*" and not self.is_free(left):
            field, other = right, self.value(left)
        if not self.is_free(field):
            return
        value = array.lengths[i]
        if operator == "":
            if i == 0 and len(array.lead) != 1:
                self.merged[field] = array.lead
        elif operator == "+":
            value -= other
        elif operator == "-":
            value += other
        elif not other:  # nothing follows from nothing
            return
        elif operator == "/":
            value *= other
        else:
            # Where each factor has an axis, that of the other one is what it is.
            apart = i == 0 and len(array.lead) == 2 and field == right
            if value % other or (apart and array.lead[0] != other):
                return
            value //= other
        self.found[field] = value
        self.source[field] = array

    def too_few_axes(self):
        """The first array with too few axes to tell a field that none tells."""
        for array in self.arrays:
            terms = () if array.enough else filter(None, map(parse, array.names))
            if any(self.is_free(left) or (right and self.is_free(right)) for left, _, right in terms):
                return array
        return None

    def output_shape(self, operand):
        """The shape of an output to make: rows as the arrays have them."""
        if self.full is not None and operand.axes[:2] == QUANTISED:
            return self.full.shape
        lead = self.merged.get(operand.axes[0])
        return operand.shape if lead is None else lead + operand.shape[1:]
