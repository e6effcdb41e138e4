"""Whether a model says the same with other experts. huggingface.py leaves out those that differ."""
import torch

from huggingface_models import Decoder, Routing

MOST_DIFFERENCE = 0.03  # ||got - want|| / ||want||, of some layers of roundings to bf16
MOST_GRADIENT_DIFFERENCE = 0.04  # twice as many roundings
MOST_COMPILED_DIFFERENCE = 0.06  # inductor leaves out the roundings between what it fuses
MOST_LOSS_DIFFERENCE = 2.0 ** -9  # of the loss: half a rounding to bf16
CLEAR = 0.1  # a token is clear that leads the next one by this much of all logits' deviation
SEQUENCES, STEPS = 16, 8


def learned(model, tokens):
    """Logits and loss; gradients are in the parameters."""
    model.zero_grad()
    result = model(input_ids=tokens, labels=tokens, use_cache=False)
    result.loss.backward()
    return result


def apart(got, want):
    """Of each row."""
    got, want = got.float(), want.float()
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)


def stepped(decoder, step, forced=None):
    """Logits [steps, sequences, words] and the tokens that they follow: its own, or those given."""
    decoder.rewind()
    rows, tokens = [], []
    for at in range(STEPS):
        if forced:
            decoder.token.copy_(forced[at])
        tokens.append(decoder.token.clone())
        rows.append(step()[:, -1].clone())
    return torch.stack(rows), tokens


def require_same_steps(decoder, run, most=MOST_DIFFERENCE):
    """A graph's steps are those of the model called plainly. Fused roundings may move a token to
    another expert, so most rows count."""
    want, tokens = stepped(decoder, decoder.step)
    difference = float(apart(stepped(decoder, run, tokens)[0], want).median())
    if not difference <= most:
        raise RuntimeError(f"logits differ by {difference:.3g} of their norm from those of the "
                           "same model outside of a graph")


class Check:
    """What eager says, with the routing that it has; `seen` is what came of others."""

    def __init__(self, models):
        self.models, self.model = models, models.deep
        self.seen = {"differences": {}, "losses": {}, "tokens_equal": {}}

    def note(self, name, results, wanted):
        """Raises where a result differs."""
        apart_by = {what: float(apart(results[what].flatten(), want.flatten()))
                    for what, want in wanted.items()}
        self.seen["differences"].setdefault(name, {}).update(
            {what: round(difference, 5) for what, difference in apart_by.items()})
        for what, difference in apart_by.items():
            if not difference <= (MOST_GRADIENT_DIFFERENCE if "gradients" in what
                                  else MOST_DIFFERENCE):
                raise RuntimeError(f"{what} differ by {difference:.3g} of their norm from eager's")


class LearnedCheck(Check):
    """Of a step: the loss, the logits and some gradients."""

    def __init__(self, models, batch):
        super().__init__(models)
        self.tokens, self.routing = models.words(*batch), Routing(models.deep)
        models.take("eager")
        with torch.no_grad(), self.routing.recorded():
            self.model(self.tokens, use_cache=False)
        self.loss, self.wanted = self.results()

    def results(self):
        with self.routing.replayed():
            result = learned(self.model, self.tokens)
        found = {"logits": result.logits.detach(),
                 "gradients of down_proj": self.routing.experts[0].down_proj.grad,
                 "gradients of the embedding": self.model.model.embed_tokens.weight.grad}
        self.model.zero_grad()
        return result.loss.item(), found

    def require(self, name):
        """Raises where something differs."""
        self.models.take(name)
        loss, results = self.results()
        self.seen["losses"][name] = round(loss, 6)
        self.note(name, results, self.wanted)
        if not abs(loss - self.loss) <= MOST_LOSS_DIFFERENCE * self.loss:
            raise RuntimeError(f"loss is {loss:.6f}, must be {self.loss:.6f} as eager's")


class DecodedCheck(Check):
    """Of steps of one token a sequence: logits, and the tokens that lead."""

    def __init__(self, models, prompt):
        super().__init__(models)
        self.routing = Routing(models.deep)
        models.take("eager")
        self.decoder = Decoder(models.deep, models.words(SEQUENCES, prompt), STEPS)
        with self.routing.recorded():
            self.logits, self.tokens = stepped(self.decoder, self.decoder.step)
        best = self.logits.float().topk(2).values
        self.clear = best[..., 0] - best[..., 1] > CLEAR * self.logits.float().std(-1)
        if not self.clear.any():
            raise SystemExit("no token leads clearly, so none can be compared")

    def require(self, name):
        """Raises where something differs."""
        self.models.take(name)
        with self.routing.replayed():
            logits, _ = stepped(self.decoder, self.decoder.step, self.tokens)
        equal = logits.argmax(-1) == self.logits.argmax(-1)
        self.seen["tokens_equal"][name] = f"{int(equal.sum())} of {equal.numel()}"
        self.note(name, {"logits of decode": logits}, {"logits of decode": self.logits})
        if not equal[self.clear].all():
            raise RuntimeError(f"{int((~equal[self.clear]).sum())} greedy tokens are not eager's")
