"""A fault for tests of what compares gradients."""
import torch


class GradientTimes(torch.autograd.Function):
    """GradientTimes.apply(value, factor) is the value; its gradient is too large by the factor."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None
