import time

from tandem.log import setup
from tandem.telemetry.displays import Progress

log = setup(None, 0, 0, to_terminal=True, json_lines=False)
progress = Progress(1200)
for step in range(1, 1201):
    progress.advance(step)
    time.sleep(0.0005)
    if step % 100 == 0:
        progress.report(step, epoch=step // 600 + 1, loss=0.1234, samples_per_second=1170.4)
    if step == 600:
        progress.note("evaluation after step 600: accuracy 0.9")
        log.warning("a save has failed")
progress.close()
log.info("the end")
