"""Harm of a format to each layer: a number that ranks layers and formats by the damage to the model's results."""

from collections.abc import Mapping, Sequence

from flexengine.codec.named import WEIGHTS
from flexengine.model.encoding import forms, matrix_pieces
from flexengine.model.form import WeightFormat
from flexengine.model.importance import Importances
from flexengine.model.loading import Origin
from flexengine.model.skeleton import Skeleton

VERSION = 1  # part of the cache's key: raise it when the measured harms change
