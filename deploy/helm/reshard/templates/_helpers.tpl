{{- define "reshard.selector" -}}
app.kubernetes.io/name: reshard
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "reshard.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
labels:
  {{- include "reshard.selector" . | nindent 2 }}
{{- end }}

{{- /* What pods of workers, control and the page share. Without enableServiceLinks: false, Kubernetes would set
RESHARD_WEB_PORT and others of our variables to addresses of the Services. */}}
{{- define "reshard.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 60
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "reshard.container" -}}
name: {{ .component }}
image: {{ printf "%s:%s" .root.Values.image.repository (.root.Values.image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [{{ .component }}]
envFrom:
  - configMapRef:
      name: {{ .root.Release.Name }}-settings
volumeMounts:
  - name: work
    mountPath: /work
  - name: secrets
    mountPath: /run/secrets/reshard
    readOnly: true
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "reshard.secrets" -}}
name: secrets
secret:
  secretName: {{ .Values.secret }}
  defaultMode: 288 # 0440
{{- end }}

{{- /* A worker imports torch before it answers, and does not answer while its broker is away at its start. */}}
{{- define "reshard.probes" -}}
startupProbe:
  httpGet: { path: /healthz, port: http }
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: { path: /healthz, port: http }
  timeoutSeconds: 5
  periodSeconds: 20
  failureThreshold: 6
readinessProbe:
  httpGet: { path: /readyz, port: http }
  timeoutSeconds: 5
{{- end }}

{{- define "reshard.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}

{{- define "reshard.restarts" -}}
annotations:
  reshard/settings: {{ include (print .Template.BasePath "/settings.yaml") . | sha256sum | trunc 16 }}
{{- end }}
