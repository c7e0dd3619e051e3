"""Two methods on the embedded digits: what does a user gain from the others."""

import idiolect

federation = idiolect.federation("embedded", partition="persfl-ds1", seed=0)
alone = idiolect.fit("local", federation, model="dnn", rounds=10, lr=0.05)
together = idiolect.fit("fedavg-ft", federation, model="dnn", rounds=10, lr=0.05, tune_epochs=5)

print(f"alone {alone.mean:.1%}, together {together.mean:.1%}")
for row in together.table()[:3]:
    print(row["client"], row["model"], f"{row['accuracy']:.1%}")
