"""Task vectors and model merging. Independent of the optimizer: nothing else of cost_mtl is imported here.

- :class:`TaskVector`, :func:`task_arithmetic`, :func:`task_analogy`, :func:`search_scale`: arithmetic on fine-tunings.
- :class:`AnisotropicScaling`, :class:`DVBASI`, :class:`RankPruning`: merges whose coefficients are trained.
- :func:`ties`, :func:`dare`, :func:`breadcrumbs`: thinned-out task vectors; :class:`TaskVectorBasis`: compressed ones.
- :func:`merge_checkpoint`, and the command ``cost-mtl merge``: checkpoints on disk.
"""

from cost_mtl.merging.anisotropic import AnisotropicScaling
from cost_mtl.merging.arithmetic import ScaleSearch, search_scale, task_analogy, task_arithmetic
from cost_mtl.merging.basis import TaskVectorBasis
from cost_mtl.merging.checkpoint import CheckpointSource
from cost_mtl.merging.dvbasi import DVBASI, DVBASIResult, Iteration
from cost_mtl.merging.files import merge_checkpoint, open_vectors
from cost_mtl.merging.fitting import FitReport, FitSettings, Loss
from cost_mtl.merging.losses import entropy, negation_loss
from cost_mtl.merging.merged_model import MergedModel
from cost_mtl.merging.rank_pruning import RankPruning
from cost_mtl.merging.source import Model
from cost_mtl.merging.sparsify import breadcrumbs, dare
from cost_mtl.merging.statistics import recalibrate_batchnorm
from cost_mtl.merging.task_vector import TaskVector, combine, gram
from cost_mtl.merging.ties_merge import ties

__all__ = [
    "DVBASI",
    "AnisotropicScaling",
    "CheckpointSource",
    "DVBASIResult",
    "FitReport",
    "FitSettings",
    "Iteration",
    "Loss",
    "MergedModel",
    "Model",
    "RankPruning",
    "ScaleSearch",
    "TaskVector",
    "TaskVectorBasis",
    "breadcrumbs",
    "combine",
    "dare",
    "entropy",
    "gram",
    "merge_checkpoint",
    "negation_loss",
    "open_vectors",
    "recalibrate_batchnorm",
    "search_scale",
    "task_analogy",
    "task_arithmetic",
    "ties",
]
