"""Task vectors and model merging. Independent of the optimizer: nothing else of cost_mtl is imported here.

- :class:`TaskVector`, :func:`task_arithmetic`, :func:`task_analogy`, :func:`search_scale`: arithmetic on fine-tunings.
- :class:`AnisotropicScaling`, :class:`DVBASI`, :class:`RankPruning`: merges whose coefficients are trained.
- :func:`ties`, :func:`dare`, :func:`breadcrumbs`: thinned-out task vectors; :class:`TaskVectorBasis`: compressed ones.
- :func:`merge_checkpoint`, and the command ``cost-mtl merge``: checkpoints on disk.
"""

from cost_mtl.merging.arithmetic import ScaleSearch, search_scale, task_analogy, task_arithmetic
from cost_mtl.merging.checkpoint import CheckpointSource
from cost_mtl.merging.files import merge_checkpoint, open_vectors
from cost_mtl.merging.sparsify import breadcrumbs, dare
from cost_mtl.merging.statistics import recalibrate_batchnorm
from cost_mtl.merging.task_vector import TaskVector, combine, gram
from cost_mtl.merging.ties import ties

__all__ = [
    "CheckpointSource",
    "ScaleSearch",
    "TaskVector",
    "breadcrumbs",
    "combine",
    "dare",
    "gram",
    "merge_checkpoint",
    "open_vectors",
    "recalibrate_batchnorm",
    "search_scale",
    "task_analogy",
    "task_arithmetic",
    "ties",
]
