#!/bin/sh
# Makes the secrets that deploy/compose.yaml mounts, in deploy/secrets or the folder that is named; keeps those that are
# there. To change a password, delete its file, run this again and start the broker, then all else, anew.
set -eu
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 700 "$folder" # one that was there, too
cd "$folder"
umask 022 # containers read them, each as a user of its own; on this machine the folder keeps others out
for name in broker-password client-password; do
  [ -s "$name" ] || head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' > "$name"
done
[ -e hf-token ] || : > hf-token
hashed() { tr -d '\n' < "$1" | sha256sum | cut -d ' ' -f 1; }
# Workers, control and the page are the default user. Clients elsewhere get what they call, on the queue's keys alone:
# nothing that shuts down, empties or configures the server, nor the stream `reshard:events`, which control acts on.
cat > broker-users <<END
user default on #$(hashed broker-password) ~* &* +@all
user client on #$(hashed client-password) ~reshard:[^e]* +@read +@write +@connection +@transaction +@scripting -script|flush -script|kill -script|debug -function -fcall -fcall_ro +time -@dangerous +info
END
