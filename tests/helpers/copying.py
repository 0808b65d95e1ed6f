"""The ways in which Python copies an object."""

import copy
import pickle

import cloudpickle

COPIES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "cloudpickle": lambda m: pickle.loads(cloudpickle.dumps(m)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda m: copy.deepcopy([m, m])[1],
}
