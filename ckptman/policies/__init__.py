"""Pure decisions: when to save, what to keep, whether to run again. No I/O, no clock.

For users: the save policies and the retention policies, which combine with `|`, and `Tier`.
"""

from ckptman.policies.calendar import KeepDaily as KeepDaily
from ckptman.policies.calendar import KeepHourly as KeepHourly
from ckptman.policies.calendar import KeepMonthly as KeepMonthly
from ckptman.policies.calendar import KeepWeekly as KeepWeekly
from ckptman.policies.calendar import KeepWithin as KeepWithin
from ckptman.policies.retention import KeepBest as KeepBest
from ckptman.policies.retention import KeepEvery as KeepEvery
from ckptman.policies.retention import KeepLast as KeepLast
from ckptman.policies.retention import RetentionPolicy as RetentionPolicy
from ckptman.policies.retention_rules import AtMost as AtMost
from ckptman.policies.retention_rules import KeepSteps as KeepSteps
from ckptman.policies.save_policies import AtStep as AtStep
from ckptman.policies.save_policies import BeforeDeadline as BeforeDeadline
from ckptman.policies.save_policies import DalyInterval as DalyInterval
from ckptman.policies.save_policies import EverySeconds as EverySeconds
from ckptman.policies.save_policies import EverySteps as EverySteps
from ckptman.policies.save_policies import InitTimeInterval as InitTimeInterval
from ckptman.policies.save_policies import OnStop as OnStop
from ckptman.policies.save_policies import SavePolicy as SavePolicy
from ckptman.policies.tiers import Tier as Tier
