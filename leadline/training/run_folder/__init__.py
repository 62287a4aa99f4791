"""The folder of a training run: whose it is, its checkpoints, its state and its logs.

| file | content | written by |
| --- | --- | --- |
| ``recipe.yaml`` | the recipe | ``folder`` |
| ``images.json`` or ``text.json`` | fingerprints of the data | ``folder`` |
| ``log.csv``, ``evaluation.csv``, ``probe.csv`` | figures by step | ``logs`` |
| ``tensorboard/`` | the same figures, if wanted | ``logs`` |
| ``step-000123/`` | a checkpoint | ``checkpoint``, its files by ``state`` |
| ``divergence.csv`` | figures of the layers at a step that diverged | ``leadline.training.divergence`` |
| ``summary.json`` | the result | ``folder`` |

The names of these files stand in ``folder``, those of checkpoints in ``leadline.models.checkpoints``, which reads them.
"""
