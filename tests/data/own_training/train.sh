# train.sh
batch_size=$1 learning_rate=$2 evaluate_every=$3 seed=$4
awk -v batch="$batch_size" -v rate="$learning_rate" -v every="$evaluate_every" -v seed="$seed" 'BEGIN {
  srand(seed)
  for (error = 0.9; ; step++) {
    if (step % every == 0) { printf "step %d acc=%.4f\n", step, 1 - error; fflush() }
    system("sleep " 0.002 + 0.00002 * batch) # YOURS: a step
    error *= 1 - rate * batch / (batch + 64) * (0.9 + 0.2 * rand())
  }
}'
