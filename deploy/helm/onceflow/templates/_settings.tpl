{{/* The driver's name: of its Deployment, of its Service, and of its pods' label. */}}
{{- define "onceflow.driver" -}}
{{ .Release.Name }}-driver
{{- end }}

{{/* Settings of Spark as YAML; those in .Values.sparkConf take precedence. */}}
{{- define "onceflow.settings" -}}
{{- $all := dict
  "spark.driver.host" (printf "%s.%s.svc" (include "onceflow.driver" .) .Release.Namespace)
  "spark.driver.bindAddress" "$(POD_IP)"
  "spark.driver.port" "7078"
  "spark.driver.blockManager.port" "7079"
  "spark.executor.instances" .Values.executors.instances
  "spark.executor.cores" .Values.executors.cores
  "spark.executor.memory" .Values.executors.memory
  "spark.executor.memoryOverhead" .Values.executors.memoryOverhead
  "spark.executor.maxNumFailures" "100"
  "spark.executor.failuresValidityInterval" "1h"
  "spark.kubernetes.namespace" .Release.Namespace
  "spark.kubernetes.driver.pod.name" "$(POD_NAME)"
  "spark.kubernetes.container.image" .Values.image
  "spark.network.timeout" "40s"
  "spark.network.timeoutInterval" "10s"
  "spark.executor.heartbeatInterval" "5s"
}}
{{- with .Values.imagePullPolicy }}
{{- $_ := set $all "spark.kubernetes.container.image.pullPolicy" . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
{{- $_ := set $all "spark.kubernetes.container.image.pullSecrets" (join "," .) }}
{{- end }}
{{- with .Values.executors.podTemplate }}
{{- $_ := set $all "spark.kubernetes.executor.podTemplateFile" "/opt/executor/pod.yaml" }}
{{- end }}
{{- if ne .Values.state.mountPath "/var/lib/onceflow" }}
{{- $_ := set $all "spark.executorEnv.ONCEFLOW_STATE_DIR" .Values.state.mountPath }}
{{- end }}
{{- with .Values.state }}
{{- if .size }}
{{- $claim := "spark.kubernetes.executor.volumes.persistentVolumeClaim.state" }}
{{- $_ := set $all (print $claim ".options.claimName") "OnDemand" }}
{{- $_ := set $all (print $claim ".options.sizeLimit") .size }}
{{- $_ := set $all (print $claim ".mount.path") .mountPath }}
{{- $class := required "state.storageClass is missing: name a storage class of the cluster (docs/deploy.md)" .storageClass }}
{{- $_ := set $all (print $claim ".options.storageClass") $class }}
{{- $_ := set $all "spark.kubernetes.driver.ownPersistentVolumeClaim" "true" }}
{{- $_ := set $all "spark.kubernetes.driver.reusePersistentVolumeClaim" "true" }}
{{- $_ := set $all "spark.kubernetes.driver.waitToReusePersistentVolumeClaim" "true" }}
{{- /* How old a volume must be before another executor may take it over. */}}
{{- $_ := set $all "spark.kubernetes.allocation.executor.timeout" "60s" }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.env }}
{{- $_ := set $all (print "spark.executorEnv." $name) $value }}
{{- end }}
{{- range $name, $from := .Values.secretEnv }}
{{- $_ := set $all (print "spark.kubernetes.executor.secretKeyRef." $name) (print $from.secret ":" $from.key) }}
{{- end }}
{{- range $secret, $path := .Values.secretFiles }}
{{- $_ := set $all (print "spark.kubernetes.executor.secrets." $secret) $path }}
{{- end }}
{{- mergeOverwrite $all .Values.sparkConf | toYaml }}
{{- end }}

{{/* The value of PYSPARK_SUBMIT_ARGS. It is split as a shell splits: what is not plain is quoted. */}}
{{- define "onceflow.submit" -}}
--master k8s://https://kubernetes.default.svc
--driver-memory {{ .Values.driver.memory }}
{{- range $name, $value := include "onceflow.settings" . | fromYaml }}
{{- $setting := printf "%s=%v" $name $value }}
{{- if not (regexMatch "^[A-Za-z0-9_.,:/@%+=$()-]+$" $setting) }}
{{- $setting = replace "'" `'"'"'` $setting | squote }}
{{- end }}
--conf {{ $setting }}
{{- end }}
pyspark-shell
{{- end }}
