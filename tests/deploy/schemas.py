"""Whether a manifest is one: by the schemas of an old and a new Kubernetes, without a field that they do not know.

The kinds of operators have their schemas in CRDs of their own. What we use of them stands below, as those of KEDA 2.16
and of the Prometheus operator 0.80 have it; our manifests were held once against models made of these.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

VERSIONS = ("1.27", "1.37")

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object", "properties": required | optional, "required": [*required], "additionalProperties": False,
    }  # fmt: skip


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": "^(0|(([0-9]+)(ms|s|m|h|d|w|y))+)$"}
OPERATORS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        {
            "selector": _object({"matchLabels": TEXTS}),
            "endpoints": _list(_object({"port": TEXT, "interval": DURATION})),
        }
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        {
            "groups": _list(
                _object(
                    {
                        "name": TEXT,
                        "rules": _list(
                            _object({"alert": TEXT, "expr": TEXT}, labels=TEXTS, annotations=TEXTS, **{"for": DURATION})
                        ),
                    }
                )
            )
        }
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _object(
        {
            "scaleTargetRef": _object({"name": TEXT}),
            "minReplicaCount": COUNT,
            "maxReplicaCount": COUNT,
            "triggers": _list(
                _object(
                    {
                        "type": {"const": "prometheus"},
                        "metricType": {"enum": ["AverageValue", "Value"]},
                        "metadata": _object(
                            {"serverAddress": TEXT, "query": TEXT, "threshold": TEXT},
                            ignoreNullValues={"enum": ["true", "false"]},
                        ),
                    }
                )
            ),
        },
        advanced=_object(
            {
                "horizontalPodAutoscalerConfig": _object(
                    {
                        "behavior": _object(
                            {
                                "scaleDown": _object(
                                    {
                                        "stabilizationWindowSeconds": {**COUNT, "maximum": 3600},
                                        "policies": _list(
                                            _object(
                                                {"type": {"enum": ["Pods"]}, "value": COUNT, "periodSeconds": COUNT}
                                            )
                                        ),
                                    }
                                )
                            }
                        )
                    }
                )
            }
        ),
    ),
}


def check(manifest: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    if (schema := OPERATORS.get((manifest["apiVersion"], manifest["kind"]))) is not None:
        jsonschema.validate(manifest, _object({"apiVersion": TEXT, "kind": TEXT, "metadata": {}, "spec": schema}))
        return
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)
