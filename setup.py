"""Metadata of the rl_trainers package; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def long_description() -> str:
    """Returns the text of the README, or nothing if it is not there."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


INSTALL_REQUIRES = [
    "jax>=0.10,<0.11",
    "jaxlib>=0.10,<0.11",
    "numpy>=2.1,<3",
    "flax>=0.12,<0.13",
    "optax>=0.2.6,<0.3",
    "distrax>=0.1.7,<0.2",
    "rlax>=0.1.8,<0.2",
    "gymnasium>=1.2,<2",
    "gin-config>=0.5,<0.6",
    "orbax-checkpoint>=0.12,<0.13",
    "tensorboardX>=2.6.4,<3",
    "etils[epath]>=1.12,<2",
    "rich>=14,<16",
    "matplotlib>=3.9,<4",
    "rliable>=1.2,<2",
]

EXTRAS_REQUIRE = {
    "box2d": ["gymnasium[box2d]"],
    "atari": ["ale-py>=0.11,<0.13", "opencv-python-headless>=4.9,<6"],
    "mujoco": ["gymnasium[mujoco]", "mujoco>=3.3,<5"],
    "jax-envs": ["gymnax>=0.0.9,<2", "brax>=0.14,<0.15"],
    # distrax does not import after TensorFlow, which Trax imports, unless tf-keras is there.
    "trax": ["trax==1.4.1", "tf-keras>=2.20,<2.21"],
    "minari": ["minari[hdf5]>=0.5.3,<0.6"],
    # jax.export writes with flatbuffers.
    "ray": ["ray[client]>=2.50,<3", "flatbuffers>=25,<26"],
    "bench": ["stable-baselines3>=2.7,<3"],
    "notebook": ["gymnasium[classic-control]", "ipykernel>=6.29,<8"],
    "dev": [
        "gymnasium[classic-control]",
        "chex>=0.1.90,<0.2",
        "dm-env>=1.6,<2",
        "hypothesis>=6.100,<7",
        "ipykernel>=6.29,<8",
        "mypy>=2,<3",
        "nbclient>=0.10,<0.12",
        "nbformat>=5.10,<6",
        "pytest>=8,<10",
        "pytest-xdist>=3.6,<4",
        "ruff>=0.14,<0.18",
    ],
}

setup(
    name="rl_trainers",
    version="0.1.0",
    description="Reinforcement learning trainers in JAX, driven by gin, with exact resume",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["rl_trainers", "rl_trainers.*"]),
    package_data={"rl_trainers": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["rl-trainers = rl_trainers.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
