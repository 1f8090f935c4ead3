"""Package metadata. Settings of the tools live in pyproject.toml."""

from setuptools import find_packages, setup

EXTRAS = {
    "test": [
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "equinox>=0.13",
        "matplotlib>=3.8",
        "ray>=2.60; python_version < '3.15'",
    ],
    "dev": [
        "ruff>=0.14",
        "mypy>=1.15",
        "import-linter>=2.3",
    ],
    "docs": ["sphinx>=8", "myst-parser>=4"],
    "rich": ["rich>=13"],
    "plot": ["matplotlib>=3.8"],
    "ray": ["ray>=2.60"],
    "checkpoint": ["orbax-checkpoint>=0.11"],
}
EXTRAS["all"] = sorted({line for lines in EXTRAS.values() for line in lines})
# Compilers for devices that are not here: large, and of one version of jax; not in "all".
EXTRAS["dryrun-cuda12"] = [
    "jax==0.10.2",
    "jax-cuda12-plugin==0.10.2",
    "jax-cuda12-pjrt==0.10.2",
    "nvidia-cuda-nvcc-cu12",
]
EXTRAS["dryrun-tpu"] = ["libtpu"]

setup(
    name="hetpass",
    version="0.1.0",
    description="Run a JAX train step as a pipeline over a cluster whose machines differ",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["hetpass", "hetpass.*"]),
    package_data={"hetpass": ["py.typed"], "hetpass.ir": ["*.toml"], "hetpass.backend": ["*.toml"]},
    install_requires=[
        "jax>=0.10.2,<0.13",
        "jaxlib>=0.10.2,<0.13",
        "flax>=0.12",
        "optax>=0.2.5",
        "numpy>=2.0",
        "scipy>=1.13",
        "networkx>=3.2",
        "highspy>=1.8",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hetpass = hetpass.tools.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Typing :: Typed",
    ],
)
