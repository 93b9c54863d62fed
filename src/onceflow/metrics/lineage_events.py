"""Events in the form of OpenLineage's client."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    error_message_run,
    input_statistics_input_dataset,
    job_type_job,
    output_statistics_output_dataset,
    processing_engine_run,
)
from openlineage.client.uuid import generate_new_uuid

from onceflow._version import __version__
from onceflow.errors import EnvironmentUnusableError
from onceflow.metrics.lineage_run import LineageRun

_PRODUCER = f"urn:onceflow:{__version__}"


def new_client() -> OpenLineageClient:
    """A client with the configuration of the environment.

    Raises:
        EnvironmentUnusableError: that configuration is wrong.
    """
    try:
        return OpenLineageClient()
    except Exception as error:
        raise EnvironmentUnusableError(
            "OpenLineage's client cannot be configured",
            detail=f"{type(error).__name__}: {error}".partition("\n")[0],
            next_step="look at OPENLINEAGE_URL, the other variables OPENLINEAGE_..., and openlineage.yml",
        ) from error


class EventMaker:
    """Makes the events of all runs. Args: namespace: of their jobs."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        try:
            spark = version("pyspark")
        except PackageNotFoundError:  # the installation of a cluster
            spark = "unknown"
        self._engine = _made(
            processing_engine_run.ProcessingEngineRunFacet,
            version=spark,
            name="Spark",
            openlineageAdapterVersion=__version__,
        )
        self._kind = _made(
            job_type_job.JobTypeJobFacet, processingType="STREAMING", integration="ONCEFLOW", jobType="FLOW"
        )

    def new_run_id(self) -> str:
        """An id for a run."""
        return str(generate_new_uuid())

    def event(self, state: str, run: LineageRun, error: BaseException | None = None) -> RunEvent:
        """An event about a run. Its counts are those since the start of the run."""
        facets: dict[str, Any] = {"processing_engine": self._engine}
        if error is not None:
            facets["errorMessage"] = _made(
                error_message_run.ErrorMessageRunFacet, message=str(error), programmingLanguage="PYTHON"
            )
        return RunEvent(
            eventTime=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            eventType=RunState(state),
            producer=_PRODUCER,
            run=Run(run.run_id, facets),
            job=Job(self._namespace, run.query.flow, {"jobType": self._kind}),
            inputs=[_input(run, name) for name in run.inputs],
            outputs=[_output(run, name) for name in run.outputs],
        )


def _input(run: LineageRun, name: str) -> InputDataset:
    counted = _made(input_statistics_input_dataset.InputStatisticsInputDatasetFacet, rowCount=run.read.get(name, 0))
    return InputDataset(*run.inputs[name], inputFacets={"inputStatistics": counted})


def _output(run: LineageRun, name: str) -> OutputDataset:
    records, nbytes = run.written.get(name, (0, 0))
    counted = _made(output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet, rowCount=records, size=nbytes)
    return OutputDataset(*run.outputs[name], outputFacets={"outputStatistics": counted})


def _made(kind: Callable[..., Any], **fields: Any) -> Any:
    """A facet that names its producer."""
    return kind(producer=_PRODUCER, **fields)
