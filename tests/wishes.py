"""Plugins that people ask for, as strangers would write them; test_wishes.py runs each.

The names of the constants are those of the classes in them.
"""

FREEZE = '''
@plugin(affects_results=["layers"])
class Freeze:
    """Train only the layers after the first ones."""
    layers: int = 1

    @hookimpl(wrapper=True)
    def optimize_model(self):
        model = yield
        for frozen in [model.get_input_embeddings(), *model.model.layers[: self.layers]]:
            frozen.requires_grad_(False)
        return model
'''
GRADIENT_NOISE = '''
import torch

@plugin(after=["*"], affects_results=["size"])
class GradientNoise:
    """Add noise to the gradients; the same on all ranks, and after a resume."""
    size: float = 0.01
    steps: int = state(0)

    @hookimpl(wrapper=True)
    def optimizer(self):
        optimizer = yield
        optimizer.register_step_pre_hook(self.add_noise)
        return optimizer

    def add_noise(self, optimizer, args, kwargs):
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                noise = torch.randn(weight.shape, generator=generator)
                weight.grad += self.size * noise.to(weight.grad)

    @hookimpl
    def state_dict(self):
        return {"steps": self.steps}

    @hookimpl
    def load_state_dict(self, state):
        self.steps = state["steps"]
'''
MIRROR = '''
import shutil

from plugsft import Folder

@plugin()
class Mirror:
    """Copy each checkpoint and the model to another place."""
    to: Folder

    @hookimpl
    def saved(self, run, folder, kind, step):
        if run.is_main:
            shutil.copytree(folder, f"{self.to}/{kind}-{step}", dirs_exist_ok=True)
'''
QUIZ = '''
@plugin(metrics=["quiz"])
class Quiz:
    """Answer a quiz in each evaluation, as lm-eval would: eval_quiz is the share of right ones."""
    questions: dict[str, str]

    @hookimpl
    def add_metrics(self, run):
        if run.model.module.training:
            return {}
        answers = run.model.generate([*self.questions], max_tokens=4)
        right = sum(map(str.startswith, answers, self.questions.values()))
        return {"quiz": (right, len(answers))}
'''
CURRICULUM = '''
import numpy as np

@plugin()
class Curriculum:
    """Short examples first, in every epoch."""

    @hookimpl
    def order_examples(self, tokens):
        return np.argsort(tokens.lengths, kind="stable")
'''
MIXTURE = '''
import numpy as np

@plugin(affects_results=["examples"])
class Mixture:
    """Take more of the second source from epoch to epoch."""
    examples: int = 16

    @hookimpl
    def order_examples(self, tokens, epoch, seed):
        first, second = (source["examples"] for source in tokens.facts["sources"])
        random, count = np.random.default_rng([seed, epoch]), 2 + 6 * epoch
        rest = random.permutation(first)[: self.examples - count]
        return random.permutation(np.append(rest, first + np.arange(count) % second))
'''
